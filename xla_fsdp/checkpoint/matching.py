"""Which tensor of a checkpoint belongs to which of a model: by name, all checked beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..consolidate.format.dtypes import DTYPES, dtype_name
from ..consolidate.format.manifest import Group, Manifest, Optimizer, State, Tensor
from .inventory import Held, HeldBuffer, Inventory
from .optimizers import require_parameters


@dataclass(frozen=True)
class Match:
    """What to load: names in the checkpoint by what this rank holds."""

    parameters: Mapping[Held, str]
    buffers: Mapping[HeldBuffer, str]


def match_model(manifest: Manifest, inventory: Inventory, strict: bool, label: str) -> Match:
    """Raises :class:`ModelMismatchError` for names that only one side has (unless not ``strict``),
    and for shapes, dtypes or ties that differ."""
    problems: list[str] = []
    parameters = _by_name(manifest.parameters, inventory.parameters, problems)
    buffers = _by_name(manifest.buffers, inventory.buffers, problems)
    if strict:
        for kind, saved, found in (
            ("parameter", manifest.parameters, parameters),
            ("buffer", manifest.buffers, buffers),
        ):
            used = set(found.values())
            problems += [
                f"{kind} {name!r} is in the checkpoint only" for name in saved if name not in used
            ]
        wanted = [*inventory.parameters, *inventory.buffers]
        problems += [
            f"{each.name!r} is in the model only"
            for each in wanted
            if each not in parameters and each not in buffers
        ]
    for held, name in parameters.items():
        problems += _differences(held.name, held.shape, held.dtype, manifest.parameters[name])
    for buffer, name in buffers.items():
        saved = manifest.buffers[name]
        dtype = buffer.tensor.dtype
        if dtype.is_floating_point and DTYPES[saved.dtype].is_floating_point:
            dtype = DTYPES[saved.dtype]  # they may be cast for computing
        problems += _differences(buffer.name, buffer.shape, dtype, saved)
    raise_if_any(problems, label)
    return Match(parameters, buffers)


def raise_if_any(problems: Sequence[str], label: str) -> None:
    """One error for all of them, the first few in full."""
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelMismatchError(
            f"{label}: does not fit this model: {'; '.join(problems[:5])}{more}"
        )


def _by_name(saved: Mapping[str, Tensor], wanted: Iterable[Any], problems: list[str]) -> dict:
    canonical = {name: tensor.name for tensor in saved.values() for name in tensor.names}
    found = {}
    for each in wanted:
        matches = list(dict.fromkeys(canonical[n] for n in each.names if n in canonical))
        if len(matches) > 1:
            problems.append(
                f"{' and '.join(map(repr, matches))} are one in the model, two in the checkpoint"
            )
        elif matches:
            found[each] = matches[0]
    return found


def _differences(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, saved: Tensor
) -> Iterable[str]:
    mine, theirs = (dtype_name(dtype, name), list(shape)), (saved.dtype, list(saved.shape))
    if mine != theirs:
        yield (
            f"{name!r} is {mine[0]} {mine[1]} in the model, {theirs[0]} {theirs[1]} in the "
            "checkpoint"
        )


@dataclass(frozen=True)
class OptimizerMatch:
    """``groups``: the saved group of each of the optimizer's; ``states``: of every tensor that it
    optimizes, the saved names of the parameters in it and their state, ``None`` for none."""

    groups: Sequence[Group]
    states: Mapping[nn.Parameter, tuple[Sequence[tuple[Held, str]], State | None]]


def match_optimizer(
    saved: Optimizer,
    optimizer: torch.optim.Optimizer,
    inventory: Inventory,
    match: Match,
    label: str,
) -> OptimizerMatch:
    """Raises :class:`ModelMismatchError` if classes, groups or the parameters in them differ, or if
    parameters that are one vector here had different single values (``step``)."""
    if type(optimizer).__name__ != saved.kind:
        raise ModelMismatchError(
            f"{label}: is of optimizer {saved.kind}, this one is {type(optimizer).__name__}"
        )
    owners = inventory.by_holder()
    require_parameters(optimizer, owners)
    problems: list[str] = []
    groups = []
    by_names: dict[frozenset[str], list[Group]] = {}
    loaded = set(match.parameters.values())  # with strict=False perhaps not all
    for group in saved.groups:
        by_names.setdefault(frozenset(group.parameters) & loaded, []).append(group)
    for number, group in enumerate(optimizer.param_groups):
        names = frozenset(
            match.parameters[held]
            for parameter in group["params"]
            for held in owners[parameter]
            if held in match.parameters
        )
        if by_names.get(names):
            groups.append(by_names[names].pop(0))
        else:
            some = ", ".join(sorted(names)[:4])
            problems.append(
                f"parameter group {number} of the optimizer ({len(names)} parameters: {some}, ...) "
                "is no group of the checkpoint"
            )
    if any(left for names, left in by_names.items() if names):
        problems.append("the checkpoint has parameter groups that the optimizer lacks")
    states = {}
    for parameter, helds in owners.items():
        named = [(held, match.parameters[held]) for held in helds if held in match.parameters]
        states[parameter] = (named, _common_state(saved, named, problems))
    raise_if_any(problems, label)
    return OptimizerMatch(groups, states)


def _common_state(
    saved: Optimizer, named: Sequence[tuple[Held, str]], problems: list[str]
) -> State | None:
    """The state of parameters that are in one tensor here.

    One that never had a gradient has none. As an element of a vector it would have had one, with
    zeros for it: that is what it gets here.
    """
    known = {held: saved.state[name] for held, name in named if name in saved.state}
    if not known:
        return None
    first, state = next(iter(known.items()))
    for held, other in known.items():
        if other != state:
            problems.append(
                f"{held.name!r} and {first.name!r} are in one vector here, but their optimizer "
                "states differ in more than their elements (in step, perhaps)"
            )
            return None
    return state
