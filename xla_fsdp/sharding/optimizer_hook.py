"""What the type of a shard cannot know of an optimizer: one hook around every step.

| wrong or slow | how it is found | what happens |
|---|---|---|
| made before ``module.to(device)``, which replaces them | marks of ``moves.py`` | raises |
| made before wrapping | a parameter is not the shard that its home has | raises |
| state loaded by position, beside weights of the in-tree class | home has another order | raises |
| a step before a load has given values | ``deferred_values.py`` | raises |
| gradients that ``no_sync`` holds | counted at home | raises |
| gradients of this rank only | parameters outside of every unit | warns once |
| plain local tensors in loaded state | they have the shape of the shard | get the shard's type |
| step by step, where lists give the same | ``foreach`` is None | set for this step |
| shards on the host | home has a copy on the device | are sent as soon as they are new |
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import xlac
from ..moves import was_left
from ..ranks.rank import is_pretending
from .deferred_values import require_filled
from .ignored import note_of
from .shard_spec import spec_of
from .sharded_parameter import as_sharded, local
from .sharded_tensor import home_of, homes_of, require_reduced
from .unsharded import UnshardedParameter
from .user_checks import WARNED

# On an optimizer: how many parameters it had when it was checked.
_CHECKED = "_xla_fsdp_parameters_checked"
# On an optimizer: its state was found by the names of the parameters.
_BY_NAME = "_xla_fsdp_by_name"
# On an optimizer: for each step that is under way (a plan's are within one another) the groups that
# go by lists until it is over. One that ended in an error leaves them so, which changes no value.
_CHOSEN = "_xla_fsdp_foreach"
# Optimizers of torch whose results are the same bit for bit over lists, which takes half of the
# host's time (benchmarks/LOG.md). Not so are Adagrad, NAdam, RAdam, ASGD and Rprop.
_SAME = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adadelta, optim.Adamax)


@functools.cache
def watch_optimizers() -> None:
    """Registers the hook, the first time it is called."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    refuse_shards()


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.__dict__.get(_CHECKED) != len(every):
        _require_not_left(optimizer, every)
        _require_shards(optimizer)
        if _CHECKED not in optimizer.__dict__:
            _require_order(optimizer)
            _hand_out_local_state(optimizer)
        require_filled(every, f"{type(optimizer).__name__}.step() came")
        _warn_of_unreduced(optimizer)
        _take_local_state(optimizer)
        optimizer.__dict__[_CHECKED] = len(every)
    require_reduced(every, f"{type(optimizer).__name__}.step()")
    if type(optimizer) in _SAME:  # subclasses may have a step of their own
        chosen = [group for group in optimizer.param_groups if _may_go_by_lists(group)]
        for group in chosen:
            group["foreach"] = True
        optimizer.__dict__.setdefault(_CHOSEN, []).append(chosen)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    # What was the user's choice is so again, in a saved state too.
    begun = optimizer.__dict__.get(_CHOSEN)
    for group in begun.pop() if begun else ():
        group["foreach"] = None
    if is_pretending():
        return
    copies = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            home = home_of(parameter)
            if home is not None and home.copy is not None and parameter.grad is not None:
                # torch's fused kernels do not say that they changed something.
                torch.autograd.graph.increment_version(parameter)
                copies.append(home.copy)
    for copy in copies:  # on their way while the next batch is made and the next step traced
        if copy.held is not None:  # what is streamed comes when its wrapper computes
            copy.send()


# -- checks ------------------------------------------------------------------------------------


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
                    "xla_fsdp.load_full_optim_state_dict: docs/how-to/migrate-from-torch-xla.md"
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


# -- state -------------------------------------------------------------------------------------


def _hand_out_local_state(optimizer: Optimizer) -> None:
    """Has ``state_dict()`` of ``optimizer`` give plain tensors, as that of a wrapper, and
    ``load_state_dict`` take them."""
    if not has_shards(optimizer):
        return

    def plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {key: _localized(value) for key, value in state_dict["state"].items()}
        return {**state_dict, "state": state}

    optimizer.register_state_dict_post_hook(plain)
    optimizer.register_load_state_dict_post_hook(_take_local_state)


def _localized(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _localized(one) for key, one in value.items()}
    return local(value) if isinstance(value, Tensor) else value


def _take_local_state(optimizer: Optimizer) -> None:
    """Gives plain tensors in the state, of the shape of their shard, the type of the shard."""
    for parameter, state in optimizer.state.items():
        spec = spec_of(parameter)
        if spec is not None:
            for value in _tensors_in(state):
                if tuple(value.shape) == tuple(spec.local_shape):
                    as_sharded(value, spec)


def _tensors_in(state: Any) -> Iterable[Tensor]:
    if type(state) is Tensor:
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors_in(value)


# -- lists -------------------------------------------------------------------------------------


def _may_go_by_lists(group: dict[str, Any]) -> bool:
    """Whether torch's step over lists gives the same: by default it takes it on GPUs alone."""
    if group.get("foreach", False) is not None or group.get("fused"):
        return False
    if group.get("capturable") or group.get("differentiable"):
        return False
    # Rates that are tensors go by single parameters only.
    for name, value in group.items():
        several = value if isinstance(value, (list, tuple)) else (value,)
        if name != "params" and any(isinstance(each, Tensor) for each in several):
            return False
    # Operators on lists refuse gradients that were kept in another dtype.
    return all(
        p.device.type == "xla"
        and home_of(p) is not None
        and (p.grad is None or p.grad.dtype is p.dtype)
        for p in group["params"]
    )


_CHANGING = threading.Lock()
# On a function that stands in the place of torch_xla's.
_CHECKS = "_xla_fsdp_checks"


def refuse_shards() -> None:
    """Puts functions that check in the place of torch_xla's, the first time it is called."""
    with _CHANGING:
        if not hasattr(xlac.gradients_to_average.value, _CHECKS):
            xlac.gradients_to_average.value = _checked(
                xlac.gradients_to_average.value, _require_no_shards
            )
            vars(xm)["broadcast_master_param"] = _checked(
                xm.broadcast_master_param, _require_not_divided
            )


def _checked(function: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
        if xr.world_size() > 1:
            check(given)
        return function(given, *args, **kwargs)

    setattr(checked, _CHECKS, True)
    return checked


def _require_no_shards(optimizer: Optimizer) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    home = next(homes_of(parameters), None)
    if home is not None:
        raise RuntimeError(
            "xm.reduce_gradients (part of xm.optimizer_step, and what Accelerate's optimizer does "
            "without xla_fsdp.integrations.accelerate) averages gradients over the ranks once "
            f"more, and they are of different shards, such as that of {home.key!r}: leave it out, "
            "call optimizer.step(), and torch_xla.sync() after it; with Accelerate, import "
            "xla_fsdp.integrations.accelerate (with the Trainer "
            "xla_fsdp.integrations.transformers) at the top of the script"
        )


def _require_not_divided(model: nn.Module) -> None:
    home = next((home for home in homes_of(model.parameters()) if home.divided), None)
    if home is not None:
        raise RuntimeError(
            "xm.broadcast_master_param would give every rank the first one's shards, such as that "
            f"of {home.key!r}, in place of its own: call it before wrapping, or wrap with "
            "sync_module_states=True"
        )
