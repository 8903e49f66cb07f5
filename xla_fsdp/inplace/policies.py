"""The policies of ``fully_shard``, by the names and with the defaults of torch's FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..sharding.cpu_offload import CPUOffload
from ..sharding.mixed_precision import MixedPrecision, require_flags_and_dtypes


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of what a module that is sharded in place computes and sends.

    Attributes:
        param_dtype: what parameters are gathered and computed with in; ``None``: their own.
        reduce_dtype: what gradients are reduced in: ``param_dtype`` (``None``), or
            ``torch.float32``.
        output_dtype: what floating-point outputs of the module's forward are cast to.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype``.

    Raises:
        ValueError: another dtype than ``torch.float32``, ``torch.float16``, ``torch.bfloat16`` or
            ``None``, a ``reduce_dtype`` that does not go, or no bool.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        dtypes = ("param_dtype", "reduce_dtype", "output_dtype")
        require_flags_and_dtypes(self, ("cast_forward_inputs",), dtypes)

    @property
    def as_option(self) -> MixedPrecision | None:
        """The wrapper's ``mixed_precision`` that does the same, but for the outputs."""
        if self.param_dtype is None and self.reduce_dtype is None:
            return None
        cast = self.cast_forward_inputs
        return MixedPrecision(
            self.param_dtype,
            self.reduce_dtype,
            cast_forward_inputs=cast,
            cast_root_forward_inputs=cast,
        )


@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing is offloaded: shards stay on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state on the host: the wrapper's ``CPUOffload()``.

    Attributes:
        pin_memory: no effect, there is no memory to pin for a TPU.
    """

    pin_memory: bool = True


def checked_precision(policy: Any) -> MixedPrecisionPolicy:
    """Raises ValueError if ``mp_policy`` is none of ours."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(f"mp_policy must be an xla_fsdp.MixedPrecisionPolicy, got {policy!r}")
    return policy


def meant_by_offload(policy: Any) -> CPUOffload | None:
    """The wrapper's ``cpu_offload``.

    Raises:
        ValueError: ``offload_policy`` is none of ours.
    """
    if not isinstance(policy, OffloadPolicy):
        raise ValueError(
            "offload_policy must be an xla_fsdp.OffloadPolicy or xla_fsdp.CPUOffloadPolicy, got "
            f"{policy!r}"
        )
    return CPUOffload() if isinstance(policy, CPUOffloadPolicy) else None
