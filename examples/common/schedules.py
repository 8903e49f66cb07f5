"""Learning rates over the steps of a run: a linear warm-up, then steps down or half a cosine.

Every schedule is a factor on the optimizer's learning rate. It is never 0 in a step that is run: a
step with 0 is another program, which would be compiled for that one step.
"""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# Changes no weight, and is not 0.
SMALLEST = 1e-30


def step_schedule(
    optimizer: Optimizer,
    steps_per_epoch: int,
    num_warmup_epochs: float,
    divide_every_n_epochs: int,
    divisor: float,
) -> LambdaLR:
    """Up to the full rate in ``num_warmup_epochs``; divided every so many epochs from the start."""
    warmup = round(num_warmup_epochs * steps_per_epoch)

    def factor(step: int) -> float:
        divisions = step // (steps_per_epoch * divide_every_n_epochs)
        # A negative power of a large number is 0, a positive one an OverflowError.
        return max(SMALLEST, _warmup(step, warmup) * divisor**-divisions)

    return LambdaLR(optimizer, factor)


def cosine_schedule(optimizer: Optimizer, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Up to the full rate in ``warmup_steps``, then down half a cosine, to 0 after the last step.

    A run that is shorter than its warm-up ends within it.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return (1 + math.cos(math.pi * min(1.0, done))) / 2

    return LambdaLR(optimizer, factor)


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the flags made of every parameter group: rate, momentum, weight decay."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def go_on(
    optimizer: Optimizer, scheduler: LambdaLR | None, given: list[dict[str, Any]], steps: int
) -> None:
    """To be called after a checkpoint was loaded: from here on it is as the flags say now.

    An epoch of the run that goes on may have other steps, and its flags may ask for another rate;
    the checkpoint brings back those of the run before.

    Args:
        given: the :func:`settings` from before loading.
        steps: how many are done, counted in epochs as long as they are now.
    """
    for group, now in zip(optimizer.param_groups, given, strict=True):
        group.update(now)
    if scheduler is not None:
        scheduler.last_epoch = steps
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(steps)


def _warmup(step: int, steps: int) -> float:
    return max(SMALLEST, min(1.0, (step + 1) / max(1, steps)))
