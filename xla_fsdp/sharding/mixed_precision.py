"""``mixed_precision``: the dtypes of a wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..tree import map_tensors, tensors_in
from ..wording import must_be

COMPUTE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.float16, torch.bfloat16)
dtype_or_none = must_be(
    f"one of {', '.join(map(str, COMPUTE_DTYPES))} or None",
    lambda value: value is None or value in COMPUTE_DTYPES,
    ValueError,
)
require_flag = must_be("True or False", lambda value: isinstance(value, bool), ValueError)


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in NARROW else tensor


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes in which a wrapper computes and communicates, with torch FSDP's names and defaults.

    Attributes:
        param_dtype: the dtype in which parameters are gathered and used; ``compute_dtype``.
        reduce_dtype: the dtype in which gradients are reduced: ``param_dtype`` (default), or
            ``torch.float32``, which means ``fp32_reduce_scatter``.
        buffer_dtype: the dtype of floating-point buffers. Default: unchanged.
        keep_low_precision_grads: gradients have ``param_dtype``, not the dtype of their shard.
            torch's SGD, Adagrad and RMSprop (without ``foreach=True``) support this, its Adam and
            AdamW raise.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype`` in every wrapper.
        cast_root_forward_inputs: cast them in the outermost wrapper in any case.
        _module_classes_to_ignore: classes that are not cast: their 16-bit inputs become float32,
            and outputs get the dtype of the inputs. They get no separate FSDP units.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)

    def __post_init__(self) -> None:
        require_flags_and_dtypes(
            self,
            ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"),
            ("param_dtype", "reduce_dtype", "buffer_dtype"),
        )
        classes = self._module_classes_to_ignore
        if not isinstance(classes, (list, tuple, set, frozenset)) or not all(
            isinstance(one, type) and issubclass(one, nn.Module) for one in classes
        ):
            raise ValueError(
                "MixedPrecision._module_classes_to_ignore must be a list or tuple of module "
                f"classes, such as (nn.LayerNorm,), got {classes!r}"
            )


def require_flags_and_dtypes(policy: Any, flags: Sequence[str], dtypes: Sequence[str]) -> None:
    """Raises ValueError for a wrong flag or dtype of ``policy``, or incompatible dtypes."""
    kind = type(policy).__name__
    for check, names in ((require_flag, flags), (dtype_or_none, dtypes)):
        for name in names:
            check(f"{kind}.{name}", getattr(policy, name))
    if policy.reduce_dtype not in (None, torch.float32, policy.param_dtype):
        raise ValueError(
            f"{kind}.reduce_dtype={policy.reduce_dtype} is not supported with "
            f"param_dtype={policy.param_dtype}. Reduce gradients in param_dtype "
            "(reduce_dtype=None) or in torch.float32"
        )


def full_precision_modules(policy: MixedPrecision, modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Instances of the policy's classes, and all modules inside them."""
    classes, found = tuple(policy._module_classes_to_ignore), set[nn.Module]()
    for module in modules:
        if isinstance(module, classes):
            found.update(module.modules())
    return found


def compute_in_float32(policy: MixedPrecision, modules: Iterable[nn.Module]) -> None:
    """Casts inputs of the policy's modules to float32 and outputs back, except SyncBatchNorm's."""
    if policy.param_dtype not in NARROW:
        return
    classes = tuple(policy._module_classes_to_ignore)
    for module in modules:
        if not isinstance(module, classes) or getattr(module, "fsdp_keeps_buffer_dtypes", False):
            continue
        if not any(map(is_float32_hook, module._forward_pre_hooks.values())):
            widen = _Float32Hooks()
            module.register_forward_pre_hook(widen, with_kwargs=True)
            module.register_forward_hook(widen.restore)


def is_float32_hook(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", hook), _Float32Hooks)


class _Float32Hooks:
    """The forward hooks of one module."""

    def __init__(self) -> None:
        self.given: torch.dtype | None = None  # of the first 16-bit input of the current forward

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        narrow = [t.dtype for t in tensors_in((args, kwargs)) if t.dtype in NARROW]
        self.given = narrow[0] if narrow else None
        return map_tensors(to_float32, (args, kwargs))

    def restore(self, module: nn.Module, args: tuple, output: Any) -> Any:
        given, self.given = self.given, None
        if given is None:
            return output
        return map_tensors(lambda t: t.to(given) if t.dtype is torch.float32 else t, output)
