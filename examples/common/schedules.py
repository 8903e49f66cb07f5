"""Factors on the learning rate, by step: a warm-up, then steps, half a cosine or a power down."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# Changes no weight. A step with 0 is another program, which would be compiled for that one step.
SMALLEST = 1e-30


def warm_up(step: int, steps: int) -> float:
    """Linearly up to 1 in ``steps``."""
    return max(SMALLEST, min(1.0, (step + 1) / max(1, steps)))


def steps_down(step: int, warmup: int, every: int, divisor: float) -> float:
    """Up to 1 in ``warmup`` steps; divided every so many steps from the start."""
    # A negative power of a large number is 0, a positive one an OverflowError.
    return max(SMALLEST, warm_up(step, warmup) * divisor ** -(step // every))


def half_cosine(step: int, warmup: int, total: int) -> float:
    """Up to 1 in ``warmup`` steps, then down half a cosine, to 0 after the last of ``total``."""
    if step < warmup:  # a run that is shorter than its warm-up ends within it
        return warm_up(step, warmup)
    return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))) / 2


def polynomial(step: int, warmup: int, total: int, power: float, end: float) -> float:
    """Up to 1 in ``warmup`` steps, then down to ``end``, by a ``power`` of what is left."""
    if step < warmup:
        return warm_up(step, warmup)
    left = max(0.0, (total - step) / max(1, total - warmup))
    return max(SMALLEST, end + (1 - end) * left**power)


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the flags made of every parameter group: rate, momentum, weight decay."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def go_on(
    optimizer: Optimizer, scheduler: LambdaLR | None, given: list[dict[str, Any]], steps: int
) -> None:
    """Rates are as ``given`` again after loading, after ``steps``, as many an epoch as now."""
    for group, now in zip(optimizer.param_groups, given, strict=True):
        group.update(now)
    if scheduler is not None:
        scheduler.last_epoch = steps
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(steps)
