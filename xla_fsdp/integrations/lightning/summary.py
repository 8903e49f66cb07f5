"""The table of layers that the Trainer prints, with the sizes of whole parameters."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary

from ..saving import count_whole


class WholeLayerSummary(LayerSummary):
    @property
    def num_parameters(self) -> int:
        return count_whole(self._module)


class WholeSummary(ModelSummary):
    """Without sizes of inputs, which would take a forward of a model without its parameters."""

    def summarize(self) -> Any:
        found = {name: WholeLayerSummary(module) for name, module in self.named_modules}
        for layer in found.values():
            layer.detach_hook()
        shown = {k: v for k, v in found.items() if k.count(".") < self._max_depth}
        return shown if self._max_depth >= 1 else found

    @property
    def in_sizes(self) -> list[Any]:
        return ["?"] * len(self._layer_summary)

    out_sizes = in_sizes

    @property
    def total_parameters(self) -> int:
        return count_whole(self._model)

    @property
    def trainable_parameters(self) -> int:
        return count_whole(self._model, only_trainable=True)
