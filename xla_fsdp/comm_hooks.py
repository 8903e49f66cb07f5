"""Hooks for ``model.register_comm_hook(state, hook)``, under torch's names: the reduction as it is
without a hook, and in fewer bytes.

docs/how-to/communication-hooks.md says what a hook is given, and what these send and store.
"""

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

_REMOVED = ("PowerSGDState", "powerSGD_hook")  # for one release


def __getattr__(name: str) -> NoReturn:
    if name in _REMOVED:
        raise ImportError(
            f"{name} was removed: no step was shorter with PowerSGD. Use bf16_compress_hook, or a "
            "hook of your own: docs/how-to/communication-hooks.md"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def reduce_scatter_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """What happens without a hook."""
    _require_no_state("reduce_scatter_hook", state)
    return bucket.reduce()


def allreduce_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """What happens without a hook: torch has two, for sharded wrappers and for others."""
    _require_no_state("allreduce_hook", state)
    return bucket.reduce()


def bf16_compress_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """Sends gradients, and sums them up, in bfloat16.

    The mean is within a rounding to bfloat16 (1/256 of a value) for each sum on its way. Nothing
    changes where gradients are no wider, as with ``compute_dtype=torch.bfloat16``. Complex ones
    travel as they are.
    """
    _require_no_state("bf16_compress_hook", state)
    buffer = bucket.buffer()
    if _is_wider(buffer):
        return bucket.reduce(buffer.to(torch.bfloat16))
    return bucket.reduce()


def fp16_compress_hook(state: None, bucket: GradBucket) -> torch.Tensor:
    """Sends gradients, and sums them up, in float16: 1/2048 of a value, but 65504 is infinite and
    what is below 6e-8 is lost. As :func:`bf16_compress_hook` otherwise."""
    _require_no_state("fp16_compress_hook", state)
    buffer = bucket.buffer()
    if _is_wider(buffer):
        # Half of the division before the sum, which would overflow, half after it.
        before = 1
        while before * before < bucket.ranks:
            before *= 2
        return bucket.reduce((buffer / before).to(torch.float16), divided_by=before)
    return bucket.reduce()


def _is_wider(buffer: torch.Tensor) -> bool:
    return buffer.dtype in (torch.float32, torch.float64)


def _require_no_state(name: str, state: object) -> None:
    if state is not None:
        raise TypeError(
            f"{name} has no state, which torch takes for a process group: register it with "
            f"model.register_comm_hook(None, {name}), got {state!r}. Groups are those of the "
            "wrapper, divisors are set with set_gradient_divide_factors"
        )
