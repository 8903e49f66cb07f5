"""Training that gets slow without an error, found before an optimizer's step and warned of once.

XLA tells whether a shard waits for its value, and counts the programs that the process compiled. It
does not tell what they were compiled for, so the warning lists causes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch_xla.debug.metrics as met
from torch.optim import Optimizer

from .. import xlac
from ..ranks.rank import is_pretending
from .sharded_tensor import home_of

# On an optimizer: its _Steps.
_STEPS = "_xla_fsdp_slow_steps"
# Consecutive steps before a warning: more than at the start of a training, or for an odd batch.
PENDING_STEPS = 8
COMPILED_STEPS = 12


@dataclass
class _Steps:
    """Of the steps of one optimizer.

    Attributes:
        pending: consecutive steps that began before the previous one had run.
        compiled: consecutive steps before which the process compiled something.
        compilations: of the process, at the last step.
        warned: nothing more is to be said.
    """

    pending: int = 0
    compiled: int = 0
    compilations: int | None = None
    warned: bool = False


def warn_of_slow_steps(optimizer: Optimizer) -> None:
    """Warns once if the last steps of ``optimizer`` did not run, or if all of them compiled."""
    steps = optimizer.__dict__.setdefault(_STEPS, _Steps())
    shard = _a_shard(optimizer)
    if steps.warned or shard is None or is_pretending():
        return
    pending = xlac.are_pending([shard])[0]
    steps.pending = steps.pending + 1 if pending else 0
    compilations = met.counter_value("UncachedCompile") or 0
    compiled = steps.compilations is not None and compilations > steps.compilations
    steps.compiled = steps.compiled + 1 if compiled else 0
    steps.compilations = compilations
    kind = type(optimizer).__name__
    if steps.pending >= PENDING_STEPS:
        steps.warned = True
        warnings.warn(
            f"the last {steps.pending} steps of {kind} were recorded, but none of them has run: "
            "XLA runs what was recorded at torch_xla.sync(), and a program of many steps takes "
            "ever longer to record and to compile. Call torch_xla.sync() after every "
            "optimizer.step()",
            stacklevel=2,
        )
    elif steps.compiled >= COMPILED_STEPS:
        steps.warned = True
        warnings.warn(
            f"XLA compiled something between each of the last {steps.compiled} steps of {kind}, "
            "which takes seconds to minutes each time. Causes are shapes of inputs, or Python "
            "numbers that the model computes with, that are new in every step, and what else this "
            "process computes between steps, such as evaluation or another model. Pad batches to a "
            "few fixed shapes (drop_last=True of the DataLoader for the last one), and pass "
            "numbers that change as tensors",
            stacklevel=2,
        )


def _a_shard(optimizer: Optimizer) -> torch.Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.is_xla and home_of(parameter) is not None:
                return parameter
    return None
