"""Factors of the learning rate by step: a warm-up, then a decay (steps, cosine or polynomial)."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# Too small to change a weight. 0 would be compiled as another program, for one step.
SMALLEST = 1e-30


def warm_up(step: int, steps: int) -> float:
    """Increases linearly to 1 in ``steps`` steps."""
    return max(SMALLEST, min(1.0, (step + 1) / max(1, steps)))


def steps_down(step: int, warmup: int, every: int, divisor: float) -> float:
    """A warm-up of ``warmup`` steps; divides by ``divisor`` every ``every`` steps."""
    # A negative power of a large number is 0, a positive one an OverflowError.
    return max(SMALLEST, warm_up(step, warmup) * divisor ** -(step // every))


def half_cosine(step: int, warmup: int, total: int) -> float:
    """A warm-up of ``warmup`` steps, then half a cosine to 0 after the last of ``total``."""
    if step < warmup:  # this may be all of a short run
        return warm_up(step, warmup)
    return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))) / 2


def polynomial(step: int, warmup: int, total: int, power: float, end: float) -> float:
    """A warm-up of ``warmup`` steps, then a polynomial decay of degree ``power`` to ``end``."""
    if step < warmup:
        return warm_up(step, warmup)
    left = max(0.0, (total - step) / max(1, total - warmup))
    return max(SMALLEST, end + (1 - end) * left**power)


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of every parameter group from the flags: rate, momentum, weight decay."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def resume(
    optimizer: Optimizer, scheduler: LambdaLR | None, given: list[dict[str, Any]], steps: int
) -> None:
    """Restores the settings ``given`` after loading, and continues the schedule after ``steps``."""
    for group, now in zip(optimizer.param_groups, given, strict=True):
        group.update(now)
    if scheduler is not None:
        scheduler.last_epoch = steps
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(steps)
