"""Which saved state of an optimizer belongs to which parameter: all checked beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..sharding.sharded_parameter import local
from .inventory import Held, Inventory
from .matching import listed, raise_if_any
from .optimizer_forms import MemberValues, by_number, saver_of
from .optimizers import Groups, elementwise_keys, options
from .stored import Stored, same_bits

# Options that say how to compute, not what: those of the machine that goes on.
_HOW = {"foreach", "fused", "capturable", "differentiable"}
# Came to optimizers late; states saved before lack them.
_LATE = {*_HOW, "maximize", "decoupled_weight_decay"}


@dataclass(frozen=True, eq=False)
class Number:
    """State that is one value for a parameter, not one for each of its elements.

    Attributes:
        on_device: whether it was a tensor beside the parameter; ``None`` if that is not known.
    """

    value: Any
    on_device: bool | None = None


@dataclass(frozen=True)
class OptimizerState:
    """State of an unsharded optimizer.

    Attributes:
        state: by name and key: a tensor, a :class:`~.stored.Stored` one, or a plain value; if
            ``kind`` is known, :class:`~.stored.Stored` or :class:`Number`.
        groups: options of every parameter group, and the names of its parameters.
        lists_all_groups: ``False`` where options are stored by parameter, so that those of a group
            without parameters are nowhere.
        kind: the class of the optimizer, where a sharded one was saved to go on with. Then groups
            must be the same, and how it computed is taken over as well.
        said: whether ``state`` is in an optimizer's own words, see ``optimizer_forms``.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: list[tuple[dict[str, Any], list[str]]]
    kind: str | None = None
    said: bool = False
    lists_all_groups: bool = True


@dataclass(frozen=True, eq=False)
class Elements:
    """State of a holder's shape; members without any are ``None``, and get zeros."""

    shape: torch.Size
    dtype: torch.dtype
    members: Mapping[Held, Stored | None]
    ready: torch.Tensor | None = None  # this rank's part, once it is read


@dataclass(frozen=True)
class OptimizerMatch:
    """What goes where, all of it checked.

    Attributes:
        groups: all options of every group, as torch's ``load_state_dict`` would leave them;
            ``None``: as they are.
        state: of every holder, by key.
    """

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any] | None]
    state: dict[nn.Parameter, dict[str, Elements | Number | MemberValues]]


def match_optimizer(
    inventory: Inventory,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    saved: OptimizerState,
    label: str,
) -> OptimizerMatch:
    """Finds the state of every parameter of the optimizer.

    A parameter that never had a gradient has no state. As an element of a vector it would have
    had one, with zeros for it: that is what it gets where it is in one with others.

    Args:
        groups: of the optimizer's groups the parameters that are to get options and state.

    Raises:
        ModelMismatchError: class, names, groups, options, shapes or keys do not fit; or parameters
            that are one vector here had different single values (``step``).
    """
    own_kind = type(optimizer).__name__
    if saved.kind not in (None, own_kind):
        raise ModelMismatchError(f"{label}: is of optimizer {saved.kind}, this one is {own_kind}")
    known = {name: held for own in groups for held in own for name in held.names}
    strangers = [name for name in saved.state if name not in known]
    if strangers:
        raise ModelMismatchError(
            f"{label}: has state of {listed(strangers)}, which the optimizer does not have"
        )
    state: dict[Held, Mapping[str, Any]]
    state = {known[name]: values for name, values in saved.state.items()}
    if len(state) != len(saved.state):
        raise ModelMismatchError(f"{label}: has state of a tied parameter under two of its names")
    new_groups = _match_groups(optimizer, groups, known, saved, label)
    problems: list[str] = []
    saver = saver_of(optimizer)
    words = None if saver is None else saver.member_state
    if saved.kind is None:
        assert saved.said is (words is not None)  # who read it has asked the optimizer
        state = {**(_said(state) if saved.said else _told_apart(state, problems))}
    found = {}
    for holder, members in inventory.by_holder().items():
        own = {held: state[held] for held in members if held in state}
        if own:
            found[holder] = _match_holder(holder, members, own, words, problems)
    raise_if_any(problems, label)
    return OptimizerMatch(optimizer, new_groups, found)


def _match_groups(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    known: Mapping[str, Held],
    saved: OptimizerState,
    label: str,
) -> list[dict[str, Any] | None]:
    """The options for each of the optimizer's groups.

    Groups are found by the names in them, those without parameters by their order. As in torch, a
    key that is not an option of the optimizer itself (a scheduler's ``initial_lr``) is there
    afterwards if it was saved, and not otherwise.
    """
    problems: list[str] = []
    home: dict[Held, int] = {}
    for number, (_, names) in enumerate(saved.groups):
        strangers = [name for name in names if name not in known]
        if strangers:
            problems.append(
                f"group {number} has {listed(strangers)}, which the optimizer does not have"
            )
        for name in names:
            if name in known and home.setdefault(known[name], number) != number:
                problems.append(f"has {name!r} in two groups")
    raise_if_any(problems, label)
    empty = [number for number, (_, names) in enumerate(saved.groups) if not names]
    own_empty = [number for number, g in enumerate(optimizer.param_groups) if not g["params"]]
    if len(empty) != len(own_empty) and saved.lists_all_groups:
        problems.append(
            f"has {len(empty)} parameter groups without parameters, and the optimizer has "
            f"{len(own_empty)}: make the optimizer with the groups that it was saved with"
        )
    same_empty = dict(zip(own_empty, empty, strict=False))
    found: list[dict[str, Any] | None] = []
    for number, (group, own) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        homeless = [held.name for held in own if held not in home]
        if homeless:
            problems.append(f"no group of it has {listed(homeless)}")
            continue
        sources = sorted({home[held] for held in own})
        if number in same_empty:
            sources = [same_empty[number]]
        if not sources:  # what it optimizes was not saved, and that was allowed
            found.append(None)
            continue
        each = [saved.groups[source] for source in sources]
        new = dict(each[0][0])
        if saved.kind is not None:
            if len(each) != 1 or {known[name] for name in each[0][1]} != set(own):
                problems.append(
                    f"parameter group {number} of the optimizer ({len(own)} parameters: "
                    f"{listed(held.name for held in own)}) is no group of the checkpoint"
                )
        elif any(not _equal(other, new) for other, _ in each):
            problems.append(
                f"has the parameters of group {number} of the optimizer in groups {sources}, "
                "which have different options"
            )
        elif new.get("maximize") and "maximize" not in group:
            problems.append(f"was trained with maximize, which {type(optimizer).__name__} lacks")
        elif lacking := sorted(optimizer.defaults.keys() - new.keys() - _LATE):
            problems.append(
                f"its groups lack {listed(lacking)}: it is of another kind of optimizer than "
                f"{type(optimizer).__name__}"
            )
        else:
            new = {key: value for key, value in new.items() if key not in _HOW}
        its_own = optimizer.defaults.keys() | _LATE
        found.append({k: v for k, v in options(group).items() if k in its_own} | new)
    raise_if_any(problems, label)
    return found


def _told_apart(
    state: Mapping[Held, Mapping[str, Any]], problems: list[str]
) -> dict[Held, dict[str, Stored | Number]]:
    """What has an element for every one of the parameter's, and what is a :class:`Number`."""
    elementwise = elementwise_keys(
        (key, value, held.shape) for held, own in state.items() for key, value in own.items()
    )
    found: dict[Held, dict[str, Stored | Number]] = {held: {} for held in state}
    for held, own in state.items():
        for key, value in own.items():
            is_tensor = isinstance(value, (torch.Tensor, Stored))
            if is_tensor and key in elementwise and tuple(value.shape) == held.shape:
                found[held][key] = value if isinstance(value, Stored) else Stored.of(value)
                continue
            if is_tensor and (key in elementwise or tuple(value.shape) not in ((), held.shape)):
                problems.append(
                    f"{key!r} of {held.name!r} has shape {list(value.shape)}, the parameter "
                    f"{list(held.shape)}"
                )
            # A None here (no momentum yet) may be a tensor there.
            found[held][key] = Number(value)
    return found


def _said(state: Mapping[Held, Mapping[str, Any]]) -> dict[Held, dict[str, Stored | Number]]:
    """What an optimizer has put into words of its own."""
    return {
        held: {k: v if isinstance(v, Stored) else Number(v) for k, v in own.items()}
        for held, own in state.items()
    }


def _match_holder(
    holder: nn.Parameter,
    members: list[Held],
    own: Mapping[Held, Mapping[str, Stored | Number]],
    words: frozenset[str] | None,
    problems: list[str],
) -> dict[str, Elements | Number | MemberValues]:
    """The state of what is one tensor in the model.

    ``words``: of an optimizer with words of its own those that each parameter has for itself. Then
    parameters may have different ones.
    """
    first, reference = next(iter(own.items()))
    if words is not None:
        reference = {key: value for state in own.values() for key, value in state.items()}
    for held, state in own.items() if words is None else ():
        if state.keys() != reference.keys():
            problems.append(
                f"{first.name!r} and {held.name!r} are stored as one tensor in the model, but have "
                f"state {sorted(reference)} and {sorted(state)}"
            )
            return {}
    found: dict[str, Elements | Number | MemberValues] = {}
    for key, one in reference.items():
        each = {held: state[key] for held, state in own.items() if key in state}
        stored = {held: value for held, value in each.items() if isinstance(value, Stored)}
        numbers = {held: value for held, value in each.items() if isinstance(value, Number)}
        dtypes = {str(value.dtype): value.dtype for value in stored.values()}
        if not stored and words is not None and key in words:
            found[key] = by_number(members, {held: n.value for held, n in numbers.items()})
        elif not stored:
            found[key] = one if isinstance(one, Number) else numbers[first]
            problems += [
                f"{first.name!r} and {held.name!r} are stored as one tensor in the model, but "
                f"{key!r} differs"
                for held, value in numbers.items()
                if not _equal(value, one)
            ]
        elif numbers:
            held = next(iter(numbers))
            problems.append(f"{key!r} of {held.name!r} is no tensor of shape {list(held.shape)}")
        elif len(dtypes) > 1:
            problems.append(
                f"{key!r} of {listed(held.name for held in each)} are {sorted(dtypes)}, but one "
                "tensor in the model"
            )
        else:
            dtype = next(iter(dtypes.values()))
            parts = {held: stored.get(held) for held in members}
            found[key] = Elements(local(holder).shape, dtype, parts)
    return found


def _equal(one: Any, two: Any) -> bool:
    """As they would be stored: NaN is NaN, and 1 is not 1.0."""
    if isinstance(one, Number) and isinstance(two, Number):
        return one.on_device is two.on_device and _equal(one.value, two.value)
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return same_bits(one, two)
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    if type(one) is not type(two):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_equal, one, two))
    return one == two or (one != one and two != two)
