"""Matches saved optimizer state with the parameters of an optimizer, and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..sharding.sharded_parameter import local
from .inventory import Inventory, ParameterShard
from .matching import format_names, raise_if_any
from .optimizer_forms import MemberValues, by_number, state_converter_of
from .optimizers import Groups, elementwise_keys, options
from .readable_tensor import ReadableTensor, same_bits

# Options that select an implementation. The optimizer's own values are kept, not the saved ones.
_HOW = {"foreach", "fused", "capturable", "differentiable"}
# Options that torch added later: state saved by earlier versions lacks them.
_LATE = {*_HOW, "maximize", "decoupled_weight_decay"}


@dataclass(frozen=True, eq=False)
class Number:
    """State that is one value for a parameter, not one value for each of its elements.

    Attributes:
        on_device: whether it was a tensor on the parameter's device; ``None`` if not known.
    """

    value: Any
    on_device: bool | None = None


@dataclass(frozen=True)
class OptimizerState:
    """State of an unsharded optimizer.

    Attributes:
        state: values by parameter name and key. If ``kind`` is not ``None``, each is a
            :class:`~.readable_tensor.ReadableTensor` or a :class:`Number`; otherwise it may also
            be a tensor or a plain value.
        groups: for each parameter group, the options and the names of its parameters.
        lists_all_groups: ``False`` if options are stored by parameter. Then groups without
            parameters are not recorded.
        kind: class name of the optimizer if it was saved in a checkpoint to resume training. Then
            the groups must be the same, and options that select an implementation are loaded too.
        is_converted: whether the optimizer has converted ``state``, see ``optimizer_forms``.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: list[tuple[dict[str, Any], list[str]]]
    kind: str | None = None
    is_converted: bool = False
    lists_all_groups: bool = True


@dataclass(frozen=True, eq=False)
class Elements:
    """State with the shape of a holder. Members that are ``None`` have no state and get zeros."""

    shape: torch.Size
    dtype: torch.dtype
    members: Mapping[ParameterShard, ReadableTensor | None]
    ready: torch.Tensor | None = None  # this rank's part, after it is read


@dataclass(frozen=True)
class OptimizerMatch:
    """The new options and state of an optimizer. All of it is checked.

    Attributes:
        groups: for each group, all options, as torch's ``load_state_dict`` would set them;
            ``None`` leaves the options of the group unchanged.
        state: for each holder, the state by key.
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

    A parameter that never had a gradient has no state. If it shares a flattened vector with
    parameters that have state, its elements get zeros.

    Args:
        groups: for each group of the optimizer, the parameters to load options and state for.

    Raises:
        ModelMismatchError: class, names, groups, options, shapes or keys do not match; or
            parameters that share a vector in this model had different single values (``step``).
    """
    own_kind = type(optimizer).__name__
    if saved.kind not in (None, own_kind):
        raise ModelMismatchError(
            f"{label}: was saved with optimizer {saved.kind}, but this optimizer is {own_kind}. "
            "Use the same class, or load without the optimizer."
        )
    known = {name: shard for own in groups for shard in own for name in shard.names}
    strangers = [name for name in saved.state if name not in known]
    if strangers:
        raise ModelMismatchError(
            f"{label}: has state of {format_names(strangers)}, which the optimizer does not have. "
            "Make the optimizer with the parameters that it was saved with."
        )
    state: dict[ParameterShard, Mapping[str, Any]]
    state = {known[name]: values for name, values in saved.state.items()}
    if len(state) != len(saved.state):
        raise ModelMismatchError(
            f"{label}: has state of a tied parameter under two of its names. Keep the state of "
            "one name."
        )
    new_groups = _match_groups(optimizer, groups, known, saved, label)
    problems: list[str] = []
    saver = state_converter_of(optimizer)
    member_state = None if saver is None else saver.member_state
    if saved.kind is None:
        # The caller has converted the state.
        assert saved.is_converted is (member_state is not None)
        state = {
            **(_wrap_numbers(state) if saved.is_converted else _classify_values(state, problems))
        }
    found = {}
    for holder, members in inventory.by_holder().items():
        own = {shard: state[shard] for shard in members if shard in state}
        if own:
            found[holder] = _match_holder(holder, members, own, member_state, problems)
    raise_if_any(problems, label)
    return OptimizerMatch(optimizer, new_groups, found)


def _match_groups(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    known: Mapping[str, ParameterShard],
    saved: OptimizerState,
    label: str,
) -> list[dict[str, Any] | None]:
    """The new options of each of the optimizer's groups.

    Groups are matched by the names of their parameters, groups without parameters by their order.
    As in torch, a key that is not an option of the optimizer (``initial_lr`` of a scheduler) is in
    the result only if it was saved.
    """
    problems: list[str] = []
    home: dict[ParameterShard, int] = {}
    for number, (_, names) in enumerate(saved.groups):
        strangers = [name for name in names if name not in known]
        if strangers:
            problems.append(
                f"group {number} has {format_names(strangers)}, which the optimizer does not have"
            )
        for name in names:
            if name in known and home.setdefault(known[name], number) != number:
                problems.append(f"has {name!r} in two groups")
    raise_if_any(problems, label)
    empty = [number for number, (_, names) in enumerate(saved.groups) if not names]
    own_empty = [number for number, g in enumerate(optimizer.param_groups) if not g["params"]]
    if len(empty) != len(own_empty) and saved.lists_all_groups:
        problems.append(
            f"has {len(empty)} parameter groups without parameters, but the optimizer has "
            f"{len(own_empty)}: make the optimizer with the groups that it was saved with"
        )
    same_empty = dict(zip(own_empty, empty, strict=False))
    found: list[dict[str, Any] | None] = []
    for number, (group, own) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        homeless = [shard.name for shard in own if shard not in home]
        if homeless:
            problems.append(f"no group of it has {format_names(homeless)}")
            continue
        sources = sorted({home[shard] for shard in own})
        if number in same_empty:
            sources = [same_empty[number]]
        if not sources:  # its parameters were not saved (strict=False)
            found.append(None)
            continue
        each = [saved.groups[source] for source in sources]
        new = dict(each[0][0])
        if saved.kind is not None:
            if len(each) != 1 or {known[name] for name in each[0][1]} != set(own):
                problems.append(
                    f"parameter group {number} of the optimizer ({len(own)} parameters: "
                    f"{format_names(shard.name for shard in own)}) is not a group of the checkpoint"
                )
        elif any(not _equal(other, new) for other, _ in each):
            problems.append(
                f"has the parameters of group {number} of the optimizer in several groups, "
                f"{sources}, which have different options"
            )
        elif new.get("maximize") and "maximize" not in group:
            problems.append(
                f"was trained with maximize, an option that {type(optimizer).__name__} lacks"
            )
        elif lacking := sorted(optimizer.defaults.keys() - new.keys() - _LATE):
            problems.append(
                f"its groups lack {format_names(lacking)}: it is of another kind of optimizer, not "
                f"{type(optimizer).__name__}"
            )
        else:
            new = {key: value for key, value in new.items() if key not in _HOW}
        its_own = optimizer.defaults.keys() | _LATE
        found.append({k: v for k, v in options(group).items() if k in its_own} | new)
    raise_if_any(problems, label)
    return found


def _classify_values(
    state: Mapping[ParameterShard, Mapping[str, Any]], problems: list[str]
) -> dict[ParameterShard, dict[str, ReadableTensor | Number]]:
    """Converts elementwise state to :class:`ReadableTensor`, other values to :class:`Number`.

    Elementwise state has one element for each element of the parameter.
    """
    elementwise = elementwise_keys(
        (key, value, shard.shape) for shard, own in state.items() for key, value in own.items()
    )
    found: dict[ParameterShard, dict[str, ReadableTensor | Number]] = {shard: {} for shard in state}
    for shard, own in state.items():
        for key, value in own.items():
            is_tensor = isinstance(value, (torch.Tensor, ReadableTensor))
            if is_tensor and key in elementwise and tuple(value.shape) == shard.shape:
                found[shard][key] = (
                    value
                    if isinstance(value, ReadableTensor)
                    else ReadableTensor.from_tensor(value)
                )
                continue
            if is_tensor and (key in elementwise or tuple(value.shape) not in ((), shard.shape)):
                problems.append(
                    f"{key!r} of {shard.name!r} has shape {list(value.shape)}, but the parameter "
                    f"has {list(shard.shape)}"
                )
            # The value of this key may be None (no momentum yet), and a tensor elsewhere.
            found[shard][key] = Number(value)
    return found


def _wrap_numbers(
    state: Mapping[ParameterShard, Mapping[str, Any]],
) -> dict[ParameterShard, dict[str, ReadableTensor | Number]]:
    """Wraps the values of converted state, except elementwise ones, as :class:`Number`."""
    return {
        shard: {k: v if isinstance(v, ReadableTensor) else Number(v) for k, v in own.items()}
        for shard, own in state.items()
    }


def _match_holder(
    holder: nn.Parameter,
    members: list[ParameterShard],
    own: Mapping[ParameterShard, Mapping[str, ReadableTensor | Number]],
    member_state: frozenset[str] | None,
    problems: list[str],
) -> dict[str, Elements | Number | MemberValues]:
    """The state of one holder, a tensor that the optimizer sees.

    ``member_state``: for an optimizer that converts its state, the keys of values that differ
    between parameters. Then parameters may also have different keys.
    """
    first, reference = next(iter(own.items()))
    if member_state is not None:
        reference = {key: value for state in own.values() for key, value in state.items()}
    for shard, state in own.items() if member_state is None else ():
        if state.keys() != reference.keys():
            problems.append(
                f"{first.name!r} and {shard.name!r} are stored as one tensor in the model, but "
                f"have state {sorted(reference)} and {sorted(state)}"
            )
            return {}
    found: dict[str, Elements | Number | MemberValues] = {}
    for key, one in reference.items():
        each = {shard: state[key] for shard, state in own.items() if key in state}
        stored = {
            shard: value for shard, value in each.items() if isinstance(value, ReadableTensor)
        }
        numbers = {shard: value for shard, value in each.items() if isinstance(value, Number)}
        dtypes = {str(value.dtype): value.dtype for value in stored.values()}
        if not stored and member_state is not None and key in member_state:
            found[key] = by_number(members, {shard: n.value for shard, n in numbers.items()})
        elif not stored:
            found[key] = one if isinstance(one, Number) else numbers[first]
            problems += [
                f"{first.name!r} and {shard.name!r} are stored as one tensor in the model, but "
                f"{key!r} differs"
                for shard, value in numbers.items()
                if not _equal(value, one)
            ]
        elif numbers:
            shard = next(iter(numbers))
            problems.append(
                f"{key!r} of {shard.name!r} must be a tensor of shape {list(shard.shape)}, as for "
                "the other parameters of its tensor"
            )
        elif len(dtypes) > 1:
            problems.append(
                f"{key!r} of {format_names(shard.name for shard in each)} has the dtypes "
                f"{sorted(dtypes)}, but the model stores these parameters as one tensor"
            )
        else:
            dtype = next(iter(dtypes.values()))
            parts = {shard: stored.get(shard) for shard in members}
            found[key] = Elements(local(holder).shape, dtype, parts)
    return found


def _equal(one: Any, two: Any) -> bool:
    """Whether two values are stored alike: NaN equals NaN, but 1 does not equal 1.0."""
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
