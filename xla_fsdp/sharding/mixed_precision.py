"""``mixed_precision``: torch FSDP's names for the dtypes of a wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

COMPUTE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of what a wrapper computes and sends, by torch FSDP's names and with its defaults.

    Attributes:
        param_dtype: what parameters are gathered and computed with in; ``compute_dtype``.
        reduce_dtype: what gradients are reduced in: ``param_dtype`` (default), or
            ``torch.float32``, which is ``fp32_reduce_scatter``.
        buffer_dtype: of floating-point buffers. Default: they keep theirs (with ``compute_dtype``
            alone they are cast to it).
        keep_low_precision_grads: after a backward gradients have ``param_dtype``, not the dtype of
            their shard. For optimizers that cope with it: torch's SGD, Adagrad and RMSprop (without
            ``foreach=True``) do, its Adam and AdamW raise.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype`` in every wrapper that
            has this policy.
        cast_root_forward_inputs: cast them in the outermost wrapper, whatever the former says.
        _module_classes_to_ignore: classes of modules that compute in the dtype in which their
            parameters are stored: neither these nor buffers are cast, inputs of 16 bits become
            float32, and outputs get the dtype of the inputs. Not only where a policy wraps, and
            without units, or collectives, of their own.
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
                "MixedPrecision._module_classes_to_ignore must be a list or tuple of classes of "
                f"modules (nn.LayerNorm), got {classes!r}"
            )

    def casts_inputs(self, root: bool) -> bool:
        """Whether a wrapper casts what its forward is given; ``root``: the outermost one."""
        return self.cast_forward_inputs or (root and self.cast_root_forward_inputs)


def require_flags_and_dtypes(policy: Any, flags: Sequence[str], dtypes: Sequence[str]) -> None:
    """Raises ValueError if an attribute of ``policy`` is no flag or no dtype to compute in, or if
    its ``reduce_dtype`` does not go with its ``param_dtype``."""
    kind = type(policy).__name__
    for name in flags:
        value = getattr(policy, name)
        if not isinstance(value, bool):
            raise ValueError(f"{kind}.{name} must be True or False, got {value!r}")
    for name in dtypes:
        value = getattr(policy, name)
        if value is not None and value not in COMPUTE_DTYPES:
            allowed = ", ".join(map(str, COMPUTE_DTYPES))
            raise ValueError(f"{kind}.{name} must be one of {allowed} or None, got {value!r}")
    if policy.reduce_dtype not in (None, torch.float32, policy.param_dtype):
        raise ValueError(
            f"{kind}.reduce_dtype={policy.reduce_dtype} with param_dtype={policy.param_dtype}: "
            "gradients are reduced in param_dtype (reduce_dtype=None) or in torch.float32, in "
            "nothing else"
        )


def meant_by_precision(policy: MixedPrecision) -> dict[str, Any]:
    """The options that ``mixed_precision`` stands for, by name."""
    widened = policy.reduce_dtype is torch.float32 and policy.param_dtype is not torch.float32
    return {
        "compute_dtype": policy.param_dtype,
        "buffer_dtype": policy.buffer_dtype,
        "fp32_reduce_scatter": widened,
    }
