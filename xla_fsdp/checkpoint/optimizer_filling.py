"""State of an unsharded optimizer, wherever it lies, into the optimizer of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from .filling import listed, part_of
from .inventory import Held, Inventory
from .optimizer_names import Groups, OptimizerState, options
from .stored import Stored

# Options that say how to compute, not what: those of the machine that goes on.
_HOW = {"foreach", "fused", "capturable", "differentiable"}
# Came to optimizers late; states saved before lack them.
_LATE = {*_HOW, "maximize", "decoupled_weight_decay"}
# State that is one number for a parameter in all of torch's optimizers.
_NUMBERS = {"step", "mu", "eta", "mu_product"}


@dataclass(frozen=True)
class Sharded:
    """State of a holder's shape; members without any are ``None``."""

    dtype: torch.dtype
    members: dict[Held, Stored | None]


@dataclass(frozen=True)
class OptimizerMatch:
    """What goes where, all of it checked.

    Attributes:
        groups: new options of every group.
        state: of every holder, by key: :class:`Sharded`, or one value for all members.
    """

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    state: dict[nn.Parameter, dict[str, Any]]


def match_optimizer(
    inventory: Inventory,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    saved: OptimizerState,
    label: str,
) -> OptimizerMatch:
    """Finds the state of every parameter of the optimizer.

    Raises:
        ModelMismatchError: names, groups, options, shapes or keys do not fit.
    """
    known = {name: held for own in groups for held in own for name in held.names}
    strangers = [name for name in saved.state if name not in known]
    if strangers:
        raise ModelMismatchError(
            f"{label}: has state of {listed(strangers)}, which the optimizer does not have"
        )
    state = {known[name]: dict(values) for name, values in saved.state.items()}
    if len(state) != len(saved.state):
        raise ModelMismatchError(f"{label}: has state of a tied parameter under two of its names")
    new_groups = _match_groups(optimizer, groups, known, saved, label)
    numbers = _numbers(state, label)
    found = {}
    for holder, members in inventory.by_holder().items():
        own = {held: state[held] for held in members if held in state}
        if own:
            found[holder] = _match_holder(members, own, numbers, label)
    return OptimizerMatch(optimizer, new_groups, found)


def fill_optimizer(match: OptimizerMatch) -> None:
    """Puts state and options in, one tensor after the other."""
    optimizer = match.optimizer
    devices = {
        key: value.device
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() == 0
    }
    for group, new in zip(optimizer.param_groups, match.groups, strict=True):
        group.update(copy.deepcopy(new))
        on_device = group.get("capturable") or group.get("fused")
        for holder in group["params"]:
            if holder not in match.state:
                optimizer.state.pop(holder, None)
                continue
            state = {}
            for key, value in match.state[holder].items():
                if isinstance(value, Sharded):
                    value = part_of(holder, value.members, value.dtype).to(holder.device)
                elif isinstance(value, torch.Tensor):
                    device = devices.get(key, holder.device if on_device else torch.device("cpu"))
                    value = value.detach().to(device, copy=True)
                state[key] = value
            optimizer.state[holder] = state


def _match_groups(optimizer, groups: Groups, known, saved, label: str) -> list[dict[str, Any]]:
    """The options for each of the optimizer's groups."""
    home: dict[Held, int] = {}
    for number, (_, names) in enumerate(saved.groups):
        strangers = [name for name in names if name not in known]
        if strangers:
            raise ModelMismatchError(
                f"{label}: group {number} has {listed(strangers)}, which the optimizer does not "
                "have"
            )
        for name in names:
            if home.setdefault(known[name], number) != number:
                raise ModelMismatchError(f"{label}: has {name!r} in two groups")
    found = []
    for number, (group, own) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        homeless = [held.name for held in own if held not in home]
        if homeless:
            raise ModelMismatchError(f"{label}: no group of it has {listed(homeless)}")
        sources = sorted({home[held] for held in own})
        each = [saved.groups[source][0] for source in sources]
        if any(not _equal(other, each[0]) for other in each[1:]):
            raise ModelMismatchError(
                f"{label}: has the parameters of group {number} of the optimizer in groups "
                f"{sources}, which have different options"
            )
        new = {key: value for key, value in (each[0] if each else {}).items() if key not in _HOW}
        lacking = sorted(options(group).keys() - new.keys() - _LATE) if each else []
        if lacking:
            raise ModelMismatchError(
                f"{label}: its groups lack {listed(lacking)}: it is of another kind of optimizer "
                f"than {type(optimizer).__name__}"
            )
        found.append(new)
    return found


def _numbers(state: Mapping[Held, Mapping[str, Any]], label: str) -> set[str]:
    """Keys whose value is one number for a parameter, not one for each of its elements.

    Of a 0-d parameter alone that cannot be told; others have the same keys.
    """
    numbers, elements, seen = set(), set(), set()
    for held, own in state.items():
        for key, value in own.items():
            shape = tuple(value.shape) if isinstance(value, (torch.Tensor, Stored)) else None
            seen.add(key)
            if shape is None or (shape == () and held.shape != ()):
                numbers.add(key)
            elif shape == held.shape and shape != ():
                elements.add(key)
            elif shape != held.shape:
                raise ModelMismatchError(
                    f"{label}: {key!r} of {held.name!r} has shape {list(shape)}, the parameter "
                    f"{list(held.shape)}"
                )
    # A None here (no momentum yet) may be a tensor there.
    numbers -= elements
    return numbers | ((seen - elements - numbers) & _NUMBERS)


def _match_holder(
    members: list[Held], own: Mapping[Held, Mapping[str, Any]], numbers: set[str], label: str
) -> dict[str, Any]:
    first, reference = next(iter(own.items()))
    for held, state in own.items():
        if state.keys() != reference.keys():
            raise ModelMismatchError(
                f"{label}: {first.name!r} and {held.name!r} are stored as one tensor in the model, "
                f"but have state {sorted(reference)} and {sorted(state)}"
            )
    found = {}
    for key in reference:
        values = {held: state[key] for held, state in own.items()}
        tensors = [isinstance(value, (torch.Tensor, Stored)) for value in values.values()]
        if key not in numbers and any(tensors):
            found[key] = _sharded(key, members, values, label)
            continue
        found[key] = reference[key]
        for held, value in values.items():
            if not _equal(value, reference[key]):
                raise ModelMismatchError(
                    f"{label}: {first.name!r} and {held.name!r} are stored as one tensor in "
                    f"the model, but {key!r} differs"
                )
    return found


def _sharded(key: str, members: list[Held], values: Mapping[Held, Any], label: str) -> Sharded:
    stored = {}
    for held, value in values.items():
        if tuple(getattr(value, "shape", (-1,))) != held.shape:
            raise ModelMismatchError(
                f"{label}: {key!r} of {held.name!r} is no tensor of shape {list(held.shape)}"
            )
        stored[held] = value if isinstance(value, Stored) else Stored.of(value)
    dtypes = {str(value.dtype): value.dtype for value in stored.values()}
    if len(dtypes) != 1:
        raise ModelMismatchError(
            f"{label}: {key!r} of {listed(held.name for held in values)} are {sorted(dtypes)}, but "
            "one tensor in the model"
        )
    return Sharded(next(iter(dtypes.values())), {held: stored.get(held) for held in members})


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype is two.dtype and torch.equal(one.cpu(), two.cpu())
    return type(one) is type(two) and one == two
