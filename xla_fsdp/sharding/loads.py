"""What the gather of a unit is made of: usually a load for each tensor.

One that travels in fewer bits (``narrow.py``) is two loads, since its scales are small and go with
the small parameters. Loads have numbers: those of the tensors first, then those of scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .narrow import Blocks, narrowed
from .sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Load:
    """A tensor as it travels.

    Attributes:
        number: of the tensor.
        shape: of what one rank sends, where it travels alone.
        dtype: on the wire.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements that one rank sends."""
        return math.prod(self.shape)

    def before(self, tensors: Sequence[ShardedTensor]) -> torch.Tensor:
        """What this rank has of it before anything waits, of any shape."""
        return tensors[self.number].source

    def encoded(self, shard: torch.Tensor, sent: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """``shard``, which is ready to go but for its dtype. ``sent``: :meth:`before` of each load,
        by its number."""
        return shard.to(self.dtype)

    def decoded(self, arrived: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """The shards of all ranks in wire shape, or ``None`` until all of it has arrived.

        ``arrived``: by the numbers of loads.
        """
        return arrived[self.number]


@dataclass(frozen=True)
class Scales(Load):
    """Those of a tensor whose :class:`Payload` has the same ``number``."""

    blocks: Blocks

    def before(self, tensors: Sequence[ShardedTensor]) -> torch.Tensor:
        return self.blocks.scales(super().before(tensors))


@dataclass(frozen=True)
class Payload(Load):
    """A tensor in fewer bits.

    Attributes:
        scales: the number of the load that its scales are.
        wire_shape: shape of its shard where it travels whole.
    """

    blocks: Blocks
    scales: int
    wire_shape: tuple[int, ...]

    def encoded(self, shard: torch.Tensor, sent: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self.blocks.payload(shard, sent[self.scales])

    def decoded(self, arrived: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        if self.number not in arrived or self.scales not in arrived:
            return None
        scales = arrived[self.scales].to(self.blocks.scale_dtype)  # wider beside wide parameters
        full = self.blocks.full(arrived[self.number], scales)
        return full.view(-1, *self.wire_shape[1:])


def loads_of(
    tensors: Sequence[ShardedTensor],
    dtypes: Sequence[torch.dtype],
    narrow: torch.dtype | None,
    small: int,
) -> list[Load]:
    """The loads of ``tensors``, which travel in ``dtypes`` unless in ``narrow``.

    ``small``: bytes up to which they travel together.
    """
    each = list(zip(tensors, dtypes, strict=True))
    loads = [Load(n, tensor.layout.wire_shape, dtype) for n, (tensor, dtype) in enumerate(each)]
    if narrow is None:
        return loads
    # Beside parameters that are not cast, all small ones travel in float32: see along_with_wide.
    wide = any(
        dtype is torch.float32 and load.numel * tensor.layout.size * 4 <= small
        for (tensor, dtype), load in zip(each, loads, strict=True)
    )
    for number, (tensor, dtype) in enumerate(each):
        layout = tensor.layout
        blocks = None
        if not tensor.wide:
            blocks = narrowed(layout, tensor.shard.dtype, dtype, narrow, small)
        if blocks is not None:
            shape, whole = (blocks.rows, blocks.columns), layout.wire_shape
            loads[number] = Payload(number, shape, blocks.dtype, blocks, len(loads), whole)
            shape = (blocks.count, blocks.columns)
            scale_dtype = torch.float32 if wide else blocks.scale_dtype
            loads.append(Scales(number, shape, scale_dtype, blocks))
    return loads
