"""Matches stored tensors and optimizer state with a model and its optimizer by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..names import dotted
from ..optim.saved import state_converter_of
from ..sharding.sharded_parameter import local
from ..wording import join_some
from .inventory import Entry, Inventory, ParameterShard, ReplicatedBuffer
from .optimizer_state import (
    ParameterGroups,
    convert_state_to_load,
    elementwise_keys,
    members_of_groups,
    number_in_holder,
    options,
)
from .readable_tensor import ReadableTensor, as_readable, read_holder_values, same_bits

# The optimizer's own values of these remain.
_HOW = {"foreach", "fused", "capturable", "differentiable"}
# State of earlier torch versions lacks these.
_LATE = {*_HOW, "maximize", "decoupled_weight_decay"}


class LoadedKeys(NamedTuple):
    """Names that were not loaded, as of ``nn.Module.load_state_dict``. Empty if ``strict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Match:
    parameters: dict[ParameterShard, ReadableTensor]
    buffers: dict[ReplicatedBuffer, ReadableTensor]
    extra_state: dict[nn.Module, Any]
    keys: LoadedKeys


def match_model(
    inventory: Inventory,
    offered: Mapping[str, Any],
    label: str,
    strict: bool = True,
    cast: bool = True,
    same_run: bool = False,
    reported: LoadedKeys | None = None,
) -> Match:
    """Finds a tensor for every parameter and buffer of the model. Raises ModelMismatchError.

    Args:
        offered: tensors as :class:`ReadableTensor` (the same object for all names of a tied
            tensor), and extra state, by name.
        label: where the values come from, for messages.
        strict: every name of the model must be available, and no other. For a tied parameter, one
            of its names is enough.
        cast: floating-point tensors may have another floating-point dtype than the parameter.
        same_run: the values are from a checkpoint to resume training, so dtypes must be equal, and
            parameters that are tied in the model must have been tied. Otherwise (weight files do
            not record ties), equal values are enough.
        reported: missing and unexpected names that ``load_state_dict`` of the module reported.
    """
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    tensors = {name: each for name, each in offered.items() if isinstance(each, ReadableTensor)}
    remedy = "consolidate it and load_weights converts it" if same_run else "cast=True converts it"

    def find(entry: Entry, kind: str, cast: bool) -> ReadableTensor | None:
        found: dict[ReadableTensor, str] = {}
        for name in entry.names:
            if name not in tensors:
                continue
            if tensors[name].kind in (None, kind):
                found.setdefault(tensors[name], name)
                used.add(name)
            elif strict:
                used.add(name)
                problems.append(
                    f"{name!r} was saved as a {tensors[name].kind}, but is a {kind} of the model"
                )
                return None
        misfits = [_mismatch(name, each, entry, cast, remedy) for each, name in found.items()]
        problems.extend(filter(None, misfits))
        if not any(misfits):
            problems.extend(_untied(found, entry, same_run))
        if not found:
            missing.append(entry.name)
        return next(iter(found), None)

    parameters = {
        shard: find(shard, "parameter", cast and not same_run) for shard in inventory.parameters
    }
    buffers = {buffer: find(buffer, "buffer", cast) for buffer in inventory.buffers}
    extra: dict[nn.Module, Any] = {}
    for name, module in inventory.extra_state.items():
        if name not in offered:
            missing.append(name)
            continue
        used.add(name)  # an extra state may be a tensor
        extra[module] = tensors[name].read_full() if name in tensors else offered[name]
    unexpected = [name for name in offered if name not in used]
    if reported is not None:
        missing, unexpected = reported
    if strict:
        odd = [f"lacks {format_names(missing)}"] if missing else []
        odd += [f"has {format_names(unexpected)}, unknown to the model"] if unexpected else []
        if odd and not problems:
            odd[-1] += "; strict=False takes what fits"
        problems += odd
    raise_if_any(problems, label)
    return Match(
        {shard: stored for shard, stored in parameters.items() if stored is not None},
        {buffer: stored for buffer, stored in buffers.items() if stored is not None},
        extra,
        LoadedKeys(missing, unexpected),
    )


def raise_if_any(problems: Sequence[str], label: str) -> None:
    if problems:
        raise ModelMismatchError(f"{label}: {join_some(problems, 5, '; ')}")


def format_names(names: Iterable[Any]) -> str:
    return join_some([repr(name) for name in names], 6)


def _mismatch(
    name: str, stored: ReadableTensor, entry: Entry, cast: bool, remedy: str
) -> str | None:
    dtype = entry.dtype
    if tuple(stored.shape) != entry.shape:
        return f"{name!r} has shape {list(stored.shape)}, but {list(entry.shape)} in the model"
    floats = dtype.is_floating_point and stored.dtype.is_floating_point
    if stored.dtype is dtype or (cast and floats):
        return None
    more = f"; {remedy}" if floats else ""
    return f"{name!r} is {stored.dtype}, but {dtype} in the model{more}"


def _untied(found: Mapping[ReadableTensor, str], entry: Entry, same_run: bool) -> Iterable[str]:
    """Yields problems if tensors for one parameter differ. In files, compares this rank's part."""
    if not found:
        return
    first, *rest = found
    for other in rest:
        names = f"{found[first]!r} and {found[other]!r}"
        if same_run:
            yield f"{names} were saved as two parameters, but are one in the model"
        elif not first.collective:  # rank 0 has compared them
            begin, end = 0, first.numel
            if isinstance(entry, ParameterShard) and not first.in_memory:
                begin, end = entry.begin, entry.end
            if not same_bits(first.read(begin, end), other.read(begin, end)):
                yield f"{names} have different values, but are one parameter in the model"


@dataclass(frozen=True, eq=False)
class Number:
    """State that is one value for a parameter, not one value for each of its elements.

    ``on_device``: whether it was a tensor on the parameter's device; ``None`` if not known.
    """

    value: Any
    on_device: bool | None = None


@dataclass(frozen=True)
class OptimizerState:
    """State of an unsharded optimizer.

    Attributes:
        state: values by parameter name and key: :class:`~.readable_tensor.ReadableTensor` or
            :class:`Number`; without ``kind`` also tensors and plain values.
        groups: for each parameter group, the options and the names of its parameters.
        kind: class name of the optimizer in a checkpoint to resume training. Then the groups must
            be the same, and options that select an implementation are loaded too.
        lists_all_groups: ``False`` if groups without parameters are not recorded.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: list[tuple[dict[str, Any], list[str]]]
    kind: str | None = None
    lists_all_groups: bool = True


# By key: a tensor of the holder's shape (or how to read it), one value, or one value or None per
# member.
HolderState = dict[str, Callable[[], torch.Tensor] | torch.Tensor | Number | list[Any]]


@dataclass(frozen=True)
class OptimizerMatch:
    """New options (``None``: unchanged) by group, and new state by holder."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any] | None]
    state: dict[nn.Parameter, HolderState]


def match_optimizer(
    inventory: Inventory,
    optimizer: torch.optim.Optimizer,
    groups: ParameterGroups,
    saved: OptimizerState,
    label: str,
) -> OptimizerMatch:
    """Finds the state of every parameter of the optimizer. Raises ModelMismatchError.

    ``groups``: for each group of the optimizer, the parameters to load options and state for.
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
        state = {**_classify_values(state, problems)}
    found = {}
    for holder, members in inventory.by_holder().items():
        own = {shard: state[shard] for shard in members if shard in state}
        if own:
            found[holder] = _match_holder(holder, members, own, member_state, problems)
    raise_if_any(problems, label)
    return OptimizerMatch(optimizer, new_groups, found)


def _match_groups(
    optimizer: torch.optim.Optimizer,
    groups: ParameterGroups,
    known: Mapping[str, ParameterShard],
    saved: OptimizerState,
    label: str,
) -> list[dict[str, Any] | None]:
    """The new options of each of the optimizer's groups, matched by names, empty groups by order.

    As in torch, keys that are no options (``initial_lr`` of a scheduler) are used only if saved.
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
        if not sources:  # not saved (strict=False)
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
        elif any(not _stored_alike(other, new) for other, _ in each):
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
    """Makes state of the parameter's shape a ReadableTensor, the rest a Number."""
    elementwise = elementwise_keys(
        (key, value, shard.shape) for shard, own in state.items() for key, value in own.items()
    )
    found: dict[ParameterShard, dict[str, ReadableTensor | Number]] = {shard: {} for shard in state}
    for shard, own in state.items():
        for key, value in own.items():
            is_tensor = isinstance(value, (torch.Tensor, ReadableTensor))
            if is_tensor and key in elementwise and tuple(value.shape) == shard.shape:
                found[shard][key] = as_readable(value)
                continue
            if is_tensor and (key in elementwise or tuple(value.shape) not in ((), shard.shape)):
                problems.append(
                    f"{key!r} of {shard.name!r} has shape {list(value.shape)}, but the parameter "
                    f"has {list(shard.shape)}"
                )
            # It may be None (no momentum yet), and others with this key tensors.
            found[shard][key] = Number(value)
    return found


def _match_holder(
    holder: nn.Parameter,
    members: list[ParameterShard],
    own: Mapping[ParameterShard, Mapping[str, ReadableTensor | Number]],
    member_state: frozenset[str] | None,
    problems: list[str],
) -> HolderState:
    """The state of one holder, a tensor that the optimizer sees.

    ``member_state``: keys of values that differ between parameters, if the optimizer converts its
    state. Then parameters may also have different keys.
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
    found: HolderState = {}
    for key in reference:
        each = {shard: state[key] for shard, state in own.items() if key in state}
        stored = {
            shard: value for shard, value in each.items() if isinstance(value, ReadableTensor)
        }
        numbers = {shard: value for shard, value in each.items() if isinstance(value, Number)}
        dtypes = {str(value.dtype): value.dtype for value in stored.values()}
        if not stored and member_state is not None and key in member_state:
            values = {number_in_holder(shard): n.value for shard, n in numbers.items()}
            last = max(map(number_in_holder, members))
            found[key] = [values.get(number) for number in range(last + 1)]
        elif not stored:
            found[key] = one = next(iter(numbers.values()))
            problems += [
                f"{first.name!r} and {shard.name!r} are stored as one tensor in the model, but "
                f"{key!r} differs"
                for shard, value in numbers.items()
                if not _stored_alike(value, one)
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
            (dtype,) = dtypes.values()
            parts = {shard: stored.get(shard) for shard in members}
            found[key] = partial(read_holder_values, local(holder).shape, dtype, parts)
    return found


def _stored_alike(one: Any, two: Any) -> bool:
    """Whether two values are stored alike: NaN equals NaN, but 1 does not equal 1.0."""
    if isinstance(one, Number) and isinstance(two, Number):
        return one.on_device is two.on_device and _stored_alike(one.value, two.value)
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return same_bits(one, two)
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_stored_alike(one[key], two[key]) for key in one)
    if type(one) is not type(two):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_stored_alike, one, two))
    return one == two or (one != one and two != two)


def convert_numbers_to_names(
    saved: Any, inventory: Inventory, optimizer: torch.optim.Optimizer, label: str
) -> OptimizerState:
    """Converts the state dict of an unwrapped model's optimizer. Raises ModelMismatchError."""
    if not isinstance(saved, Mapping) or not saved.keys() >= {"state", "param_groups"}:
        raise ModelMismatchError(
            f"{label}: is {type(saved).__name__}, expected a dict with 'state' and 'param_groups'. "
            "Pass the state_dict() of an optimizer."
        )
    state, saved_groups = saved["state"], saved["param_groups"]
    if not (
        isinstance(state, Mapping)
        and all(isinstance(own, Mapping) for own in state.values())
        and isinstance(saved_groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in saved_groups)
    ):
        raise ModelMismatchError(
            f"{label}: its 'state' and 'param_groups' are not those of an optimizer. Pass the "
            "state_dict() of an optimizer."
        )
    params = [list(group["params"]) for group in saved_groups]
    kinds = {type(one) for one in [*state, *(one for own in params for one in own)]}
    if kinds == {int}:
        groups = members_of_groups(inventory, optimizer)
        names: Any = _names_of_numbers(saved_groups, inventory, groups, label)
        unknown = [number for number in state if number not in names]
        if unknown:
            raise ModelMismatchError(
                f"{label}: has state of {format_names(unknown)}, which no group has. Pass an "
                "unchanged state_dict() of an optimizer."
            )
    elif kinds <= {str}:
        names = {name: name for name in [*state, *(one for own in params for one in own)]}
    else:
        raise ModelMismatchError(
            f"{label}: parameters must be either all names or all numbers, got both or others"
        )
    by_name: dict[str, dict[str, Any]] = {names[one]: dict(own) for one, own in state.items()}
    saver = state_converter_of(optimizer)
    if saver is not None:
        by_name = convert_state_to_load(saver, by_name, inventory, label)
    else:
        for own in by_name.values():
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    own[key] = as_readable(value)
    return OptimizerState(
        by_name,
        [
            (options(group), [names[one] for one in own])
            for group, own in zip(saved_groups, params, strict=True)
        ],
    )


def _names_of_numbers(
    saved_groups: Sequence[Mapping[str, Any]],
    inventory: Inventory,
    groups: ParameterGroups,
    label: str,
) -> dict[int, str]:
    if all("param_names" in group for group in saved_groups):
        return {
            number: dotted("", name)  # without the names of torch's wrappers
            for group in saved_groups
            for number, name in zip(group["params"], group["param_names"], strict=True)
        }
    place = {shard: number for number, shard in enumerate(inventory.parameters)}
    if [len(group["params"]) for group in saved_groups] == [len(own) for own in groups]:
        ordered = [sorted(own, key=place.__getitem__) for own in groups]
        for number, own in enumerate(groups):
            # Separate parameters, and the first block of stacks, show in which order the user
            # listed them; a vector of several parameters does not.
            firsts = [next(shards) for _, shards in groupby(own, lambda shard: id(shard.holder))]
            single = [
                place[shard]
                for shard in firsts
                if shard.layout is None or shard.numel == shard.layout.numel
            ]
            if single != sorted(single):
                raise ModelMismatchError(
                    f"{label}: has numbered parameters, but those of group {number} of the "
                    "optimizer are not in the order of the model. Use a state dict with names."
                )
    elif sum(len(group["params"]) for group in saved_groups) == len(place):
        every = iter(inventory.parameters)
        ordered = [[next(every) for _ in group["params"]] for group in saved_groups]
    else:
        raise ModelMismatchError(
            f"{label}: has groups of {[len(group['params']) for group in saved_groups]} numbered "
            f"parameters, but the optimizer has groups of {[len(own) for own in groups]}. Make the "
            "optimizer with the same groups, or use a state dict with names."
        )
    return {
        number: shard.name
        for group, own in zip(saved_groups, ordered, strict=True)
        for number, shard in zip(group["params"], own, strict=True)
    }
