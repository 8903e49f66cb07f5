"""Hooks for ``model.register_comm_hook(state, hook)``, under torch's names.

docs/communication-hooks.md says what a hook is given, and what these send and keep.
"""

from ..sharding.grad_bucket import GradBucket
from .default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from .power_sgd import PowerSGDState, powerSGD_hook

__all__ = [
    "GradBucket",
    "PowerSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "powerSGD_hook",
    "reduce_scatter_hook",
]
