"""What goes wrong with an optimizer on shards without a word, found out before its step.

torch calls hooks before every optimizer's step. One of them, registered once a process, looks at
what is wrong for good, and in every step asks each parameter whether gradients are missing.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType

import torch_xla.runtime as xr
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..moves import was_left
from .awaited import require_filled
from .elementwise import check_elementwise
from .first_step import WARNED
from .foreach_steps import choose_foreach
from .ignored import note_of
from .sharded_tensor import home_of, homes_of, require_reduced
from .slow_steps import warn_of_slow_steps
from .torch_clipping import ACCELERATE_AVERAGES, ask_all_ranks
from .unsharded import UnshardedParameter
from .whole_models import refuse_shards

# Frames between the hook and who calls the step: torch's own wrapper, and a scheduler's.
_FRAMES = 8
# Where Accelerate's optimizer is, which averages gradients over the ranks.
_ACCELERATE = "accelerate.optimizer"
# On an optimizer: how many parameters it had when it was checked.
_CHECKED = "_xla_fsdp_parameters_checked"
# On an optimizer: its state was found by the names of the parameters.
_BY_NAME = "_xla_fsdp_by_name"


@functools.cache
def watch_optimizers() -> None:
    """Registers the checks, the first time it is called."""
    register_optimizer_step_pre_hook(_before_step)
    choose_foreach()
    ask_all_ranks()
    refuse_shards()


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    number = sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer.__dict__.get(_CHECKED) != number:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        _require_not_left(optimizer, every)
        _require_shards(optimizer)
        if _CHECKED not in optimizer.__dict__:
            _require_order(optimizer)
        require_filled(every, f"{type(optimizer).__name__}.step() came")
        check_elementwise(optimizer)
        for around in _optimizers_around(optimizer, sys._getframe()):
            check_elementwise(around)
        _warn_of_empty_groups(optimizer)
        _warn_of_unreduced(optimizer)
        optimizer.__dict__[_CHECKED] = number
    warn_of_slow_steps(optimizer)
    for group in optimizer.param_groups:
        require_reduced(group["params"], f"{type(optimizer).__name__}.step()")
    caller = _caller(sys._getframe())
    if caller is not None and xr.world_size() > 1 and has_shards(optimizer):
        raise RuntimeError(_WRONG[caller])


def _require_not_left(optimizer: Optimizer, every: Sequence[Tensor]) -> None:
    """Raises RuntimeError if ``every`` parameter of it is without gradient, and one of before the
    model was moved."""
    left = next(filter(was_left, every), None)
    # Somebody else may still use them, and then they have gradients.
    if left is not None and all(parameter.grad is None for parameter in every):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before module.to(device), which has "
            f"replaced its parameters (one of shape {list(left.shape)} on {left.device}) by others "
            "on the device: it would train nothing. Make it after moving and wrapping"
        )


def _require_shards(optimizer: Optimizer) -> None:
    """Raises RuntimeError if parameters are those of before the wrapping."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if isinstance(parameter, UnshardedParameter):
                raise RuntimeError(
                    f"parameter {place} of group {number} of this {type(optimizer).__name__} is "
                    "a full parameter of a forward or of unshard(), which is empty afterwards: "
                    "make the optimizer of model.parameters() outside of both"
                )
            home = home_of(parameter)
            if home is not None and home.shard is not parameter:
                raise RuntimeError(
                    f"parameter {place} of group {number} of this {type(optimizer).__name__} "
                    f"(called {home.key!r} in its wrapper) was sharded after the optimizer was "
                    "made: the optimizer holds an empty tensor and would train nothing. Make the "
                    "optimizer after wrapping: parameters have the same names then"
                )


def state_is_by_name(optimizer: Optimizer) -> None:
    """Notes that what is in its state belongs where it is."""
    optimizer.__dict__[_BY_NAME] = True


def _require_order(optimizer: Optimizer) -> None:
    """Raises RuntimeError if state from before the first step was loaded by position, beside
    weights of the in-tree class, whose optimizers number parameters in another order."""
    if _BY_NAME in optimizer.__dict__:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            home = home_of(parameter)
            if home is not None and home.reordered and optimizer.state.get(parameter):
                raise RuntimeError(
                    f"this {type(optimizer).__name__} has state of parameter {home.key!r} before "
                    "its first step, and the weights came from torch_xla's own class, which lists "
                    "parameters in another order: load_state_dict, which goes by position, gave "
                    "parameters the state of others. Join the files by python -m "
                    "xla_fsdp.consolidate --optimizer, and load that with "
                    "xla_fsdp.load_full_optim_state_dict: docs/moving.md"
                )


def _warn_of_empty_groups(optimizer: Optimizer) -> None:
    """Warns of what choosing "matrices" by ``parameter.dim() >= 2`` leads to."""
    groups = optimizer.param_groups
    empty = [number for number, group in enumerate(groups) if not group["params"]]
    if empty and has_shards(optimizer):
        decay = groups[empty[0]].get("weight_decay")
        warnings.warn(
            f"group {empty[0]} of this {type(optimizer).__name__} (weight_decay={decay}) has no "
            "parameters; if they were chosen by dim() or shape: shards have one dimension, "
            "whatever the parameter has. Choose by name, which is the same in named_parameters()",
            stacklevel=2,
        )


def _warn_of_unreduced(optimizer: Optimizer) -> None:
    """Warns of gradients that are this rank's alone, because no wrapper has their parameters."""
    if xr.world_size() == 1:
        return
    shards = has_shards(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            note = note_of(parameter)
            if parameter.grad is None or home_of(parameter) is not None:
                continue
            if note is not None and not note.averaged:
                warnings.warn(
                    f"parameter {note.name!r} is ignored by its wrapper, so its gradient is of "
                    "this rank's batch only, and ranks will drift apart. Call "
                    "model.average_ignored_gradients() between backward and step; or leave it so, "
                    "if ranks see the same data or are meant to differ",
                    stacklevel=2,
                )
                return
            alone = shards and note is None and parameter.device.type == "xla"
            if alone and not getattr(parameter, WARNED, False):
                warnings.warn(
                    f"parameter {place} of group {number} of this {type(optimizer).__name__}, of "
                    f"shape {list(parameter.shape)}, is in no wrapper, while others are sharded: "
                    "its gradient is of this rank's batch only, and ranks will drift apart. Wrap "
                    "the module that has it (what replaces a layer goes in before wrapping), or "
                    "average its gradient by hand",
                    stacklevel=2,
                )
                return


def has_shards(optimizer: Optimizer) -> bool:
    """Whether one of its parameters is a shard."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next(homes_of(parameters), None) is not None


def _caller(frame: FrameType | None) -> str | None:
    """Who has called the step and is wrong for shards, a key of ``_WRONG``, if anybody."""
    for _ in range(_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            break
        if frame.f_code is GradScaler.step.__code__:
            asks = getattr(frame.f_locals.get("self"), "asks_all_ranks", False)
            return None if asks else "GradScaler"
        if frame.f_code.co_name == "step" and frame.f_globals.get("__name__") == _ACCELERATE:
            knows = getattr(frame.f_locals.get("self"), "knows_shards", False)
            # With this in the environment it leaves the gradients of all models alone.
            told = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on")
            return None if knows or told else "Accelerate"
    return None


def _optimizers_around(optimizer: Optimizer, frame: FrameType | None) -> Iterator[Optimizer]:
    """Those in whose methods the step was called, as sharpness-aware ones do."""
    for _ in range(_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, Optimizer) and first is not optimizer:
                yield first


_WRONG = {
    "GradScaler": "torch.amp.GradScaler looks for infinities in this rank's shards only, so some "
    "ranks would step and others not: use xla_fsdp.ShardedGradScaler, which asks all ranks",
    "Accelerate": ACCELERATE_AVERAGES,
}
