"""Modules that compute in float32 within an FSDP unit that computes in a narrower dtype.

The option is ``MixedPrecision(_module_classes_to_ignore=...)``. torch FSDP makes each such module a
unit with separate collectives. Here its parameters are gathered together with those of the
surrounding unit, in the dtype in which they are stored (see ``comm_plan.py``), and its inputs and
outputs are cast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..tree import map_tensors, tensors_in
from .comm_plan import NARROW
from .options import FSDPOptions


def full_precision_modules(options: FSDPOptions, modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The ``modules`` whose parameters and buffers are not cast: instances of the classes that
    ``options`` name, and all modules inside them."""
    policy = options.mixed_precision
    classes = tuple(policy._module_classes_to_ignore) if policy is not None else ()
    found: set[nn.Module] = set()
    for module in modules:
        if classes and isinstance(module, classes):
            found.update(module.modules())
    return found


def compute_in_float32(options: FSDPOptions, modules: Iterable[nn.Module]) -> None:
    """Makes every instance among ``modules`` of the classes that ``options`` name compute in
    float32.

    16-bit floating-point inputs become float32, and outputs get the dtype of the inputs.
    ``SyncBatchNorm`` already computes in float32 internally, so its inputs are not cast.
    """
    policy = options.mixed_precision
    if policy is None or policy.param_dtype not in NARROW:
        return
    classes = tuple(policy._module_classes_to_ignore)
    for module in modules:
        if isinstance(module, classes) and not getattr(module, "fsdp_keeps_buffer_dtypes", False):
            if not any(
                isinstance(hook, _Float32Hooks) for hook in module._forward_pre_hooks.values()
            ):
                widen = _Float32Hooks()
                module.register_forward_pre_hook(widen, with_kwargs=True)
                module.register_forward_hook(widen.restore)


def is_float32_hook(hook: object) -> bool:
    """Whether :func:`compute_in_float32` has registered ``hook``."""
    return isinstance(getattr(hook, "__self__", hook), _Float32Hooks)


class _Float32Hooks:
    """The forward hooks of one module."""

    def __init__(self) -> None:
        self.given: torch.dtype | None = None  # of the first 16-bit input of the current forward

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        narrow = [t.dtype for t in tensors_in((args, kwargs)) if t.dtype in NARROW]
        self.given = narrow[0] if narrow else None
        return map_tensors(_widened, (args, kwargs))

    def restore(self, module: nn.Module, args: tuple, output: Any) -> Any:
        given, self.given = self.given, None
        if given is None:
            return output
        return map_tensors(lambda t: t.to(given) if t.dtype is torch.float32 else t, output)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in NARROW else tensor
