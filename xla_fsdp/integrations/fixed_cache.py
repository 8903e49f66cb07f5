"""Keys and values in tensors of fixed size, however many tokens there are yet."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, StaticLayer


class FixedCache(Cache):
    """Room for ``length`` positions in every layer, also in those with a sliding window, whose
    masks leave out what is too far.

    Layers are made when they are first filled, on the device of the keys.
    """

    is_compileable = True  # the search then makes masks for all positions
    is_sliding: list[bool] = []  # asked for which layers need masks of another length: none

    def __init__(self, length: int) -> None:
        layers: Any = lambda: StaticLayer(length)  # noqa: E731  # called for each layer
        super().__init__(layer_class_to_replicate=layers)
        self.length = length
        # How many positions were filled before the forward under way; on the device if it is.
        self.seen: int | torch.Tensor = 0

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self.seen

    def get_mask_sizes(self, cache_position: torch.Tensor, layer_idx: int) -> tuple[int, int]:
        return self.length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """``beam_idx`` may be shorter than the cache has rows: those that follow stay."""
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None  # there was a forward
            rest = torch.arange(len(beam_idx), layer.keys.shape[0])
            rows = torch.cat([beam_idx.cpu(), rest]).to(layer.keys.device)
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)


class CrossCache(FixedCache):
    """Of what the encoder made, which is the same for all beams of a sequence."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        pass
