"""The precision plugins: with bf16-mixed, shards and optimizer state stay float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch_xla
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.pytorch.plugins.precision import Precision as TrainerPrecision
from lightning_utilities.core.apply_func import apply_to_collection

from ..early_optimizers import average_unsharded
from .settings import PRECISIONS


def checked_precision(plugin: Any) -> str:
    """The name of the precision of ``plugin``, which Lightning creates from ``precision=...``.

    Raises:
        ValueError: the precision is not supported on XLA.
    """
    name = "32-true" if plugin is None else getattr(plugin, "precision", type(plugin).__name__)
    if name in ("16-true", "16-mixed"):
        raise ValueError(
            f"precision={name!r} is not supported on XLA, because TPUs have no float16 units. Use "
            "'bf16-mixed', which needs no loss scaling"
        )
    if name not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    return str(name)


class _Computed:
    """The behavior of both plugins."""

    precision: Any

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.precision != "bf16-mixed":
            yield
            return
        # Losses and norms are float32, as on other devices; parameters are gathered in bfloat16.
        with torch.autocast("xla", dtype=torch.bfloat16):
            yield

    def convert_output(self, data: Any) -> Any:
        if self.precision == "32-true":
            return data
        convert = partial(_convert_fp_tensor, dst_type=torch.float32)
        return apply_to_collection(data, torch.Tensor, convert)


class ShardedFabricPrecision(_Computed, FabricPrecision):
    def __init__(self, precision: Any) -> None:
        self.precision = precision

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        average_unsharded(optimizer)
        result = optimizer.step(**kwargs)
        torch_xla.sync()
        return result


class ShardedTrainerPrecision(_Computed, TrainerPrecision):
    def __init__(self, precision: Any) -> None:
        self.precision = precision

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        # Before the step and not in it, because hooks of the step read gradients.
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        torch_xla.sync()  # computes the logged values, so that the first rank alone can read them
        return result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        average_unsharded(getattr(optimizer, "optimizer", optimizer))
        super()._after_closure(model, optimizer)
