"""Hooks for ``model.register_comm_hook(state, hook)``, under torch's names.

docs/communication-hooks.md says what a hook is given, and what these send and keep.
"""

from __future__ import annotations

from typing import NoReturn

from ..sharding.grad_bucket import GradBucket
from .default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)

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
            "hook of your own: docs/communication-hooks.md"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
