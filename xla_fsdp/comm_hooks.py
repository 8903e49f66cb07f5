"""Hooks for ``model.register_comm_hook(state, hook)``: docs/how-to/communication-hooks.md."""

from __future__ import annotations

from typing import NoReturn

import torch

from .sharding.comm_hook import GradBucket

__all__ = [
    "GradBucket",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]

_WIDE = (torch.float32, torch.float64)
_REMOVED = ("PowerSGDState", "powerSGD_hook")  # for one release


def __getattr__(name: str) -> NoReturn:
    if name in _REMOVED:
        raise ImportError(
            f"{name} was removed, because no step was shorter with PowerSGD. Use "
            "bf16_compress_hook, or write a hook: docs/how-to/communication-hooks.md"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def reduce_scatter_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """The default reduction, as without a hook."""
    _require_no_state("reduce_scatter_hook", state)
    return bucket.reduce()


def allreduce_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """The default reduction; torch's name for modules that are not sharded."""
    _require_no_state("allreduce_hook", state)
    return bucket.reduce()


def bf16_compress_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """Sends and sums float32 and float64 gradients in bfloat16.

    Each addition has a rounding error of 1/256 of a value.
    """
    _require_no_state("bf16_compress_hook", state)
    buffer = bucket.buffer()
    return bucket.reduce(buffer.to(torch.bfloat16) if buffer.dtype in _WIDE else None)


def fp16_compress_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """Sends and sums float32 and float64 gradients in float16.

    Each addition has a rounding error of 1/2048 of a value. Values above 65504 become infinite,
    values below 6e-8 become zero.
    """
    _require_no_state("fp16_compress_hook", state)
    buffer = bucket.buffer()
    if buffer.dtype not in _WIDE:
        return bucket.reduce()
    # Dividing partly before the sum avoids an overflow.
    before = 1
    while before * before < bucket.ranks:
        before *= 2
    return bucket.reduce((buffer / before).to(torch.float16), divided_by=before)


def _require_no_state(name: str, state: object) -> None:
    if state is not None:
        raise TypeError(
            f"{name} takes no state (torch's takes a process group), got {state!r}. Register it by "
            f"model.register_comm_hook(None, {name}); groups are those of the wrapper, divisors "
            "are set with set_gradient_divide_factors"
        )
