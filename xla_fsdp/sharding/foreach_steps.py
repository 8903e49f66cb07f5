"""Steps of torch's optimizers over lists of shards, which the host traces in less time.

torch has each of its optimizers twice: parameter by parameter, and over lists of all of them
(``foreach``), which it takes by default on GPUs alone. Traced for XLA both are the same operators
on the same values, and lists go through Python once instead of once a parameter: AdamW on 40
parameters takes 10.8 instead of 16.6 ms of the host's time (benchmarks/LOG.md).
"""

from __future__ import annotations

import functools

import torch
from torch import optim
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .sharded_tensor import home_of

# Those whose results are the same bit for bit. Not so are Adagrad, NAdam, RAdam, ASGD and Rprop.
_SAME = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adadelta, optim.Adamax)
# On an optimizer: for each step that is under way (a plan's are within one another) the groups that
# go by lists until it is over. One that ended in an error leaves them so, which changes no value.
_CHOSEN = "_xla_fsdp_foreach"


@functools.cache
def choose_foreach() -> None:
    """Lets optimizers of shards take it where neither choice was made, from the first call on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if type(optimizer) not in _SAME:  # subclasses may have a step of their own
        return
    chosen = [group for group in optimizer.param_groups if _may(group)]
    for group in chosen:
        group["foreach"] = True
    optimizer.__dict__.setdefault(_CHOSEN, []).append(chosen)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    # What was the user's choice is so again, in a saved state too.
    begun = optimizer.__dict__.get(_CHOSEN)
    for group in begun.pop() if begun else ():
        group["foreach"] = None


def _may(group: dict[str, object]) -> bool:
    if group.get("foreach", False) is not None or group.get("fused"):
        return False
    if group.get("capturable") or group.get("differentiable"):
        return False
    parameters = group["params"]
    assert isinstance(parameters, list)
    # Rates that are tensors go by single parameters only.
    for name, value in group.items():
        several = value if isinstance(value, (list, tuple)) else (value,)
        if name != "params" and any(isinstance(each, torch.Tensor) for each in several):
            return False
    # Operators on lists refuse gradients that were kept in another dtype.
    return all(
        p.device.type == "xla"
        and home_of(p) is not None
        and (p.grad is None or p.grad.dtype is p.dtype)
        for p in parameters
    )
