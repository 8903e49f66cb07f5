"""Whose is which optimizer state, in files that number parameters instead of naming them.

A torch optimizer numbers parameters in the order in which it was given them. That is the order of
the state_dict if it was given ``model.parameters()``; only then can it be known without guessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import UnmatchedOptimizerError
from ..format import values
from ..format.dtypes import dtype_name
from ..format.manifest import Group, Optimizer, State
from .ranks import Rank


@dataclass(frozen=True)
class MatchedState:
    """An optimizer, and by key of the state_dict what each rank keeps for it."""

    optimizer: Optimizer
    by_key: Mapping[str, list[Mapping[str, Any]]]

    def shards(self, key: str, state: str) -> list[torch.Tensor]:
        """Of every rank, in order."""
        return [each[state] for each in self.by_key[key]]


def match_optimizer(ranks: list[Rank]) -> MatchedState | None:
    """None if the files hold no optimizer at all.

    Raises:
        UnmatchedOptimizerError: they do, but the numbers cannot be given names with certainty.
    """
    if all(rank.optimizer is None for rank in ranks):
        return None
    keys = list(dict.fromkeys(k for k in ranks[0].state_dict if k in ranks[0].layout.parameters))
    found = [_numbered(rank, len(keys)) for rank in ranks]
    group = {k: v for k, v in found[0][1].items() if k != "params"}
    by_key = {key: [state.get(n, {}) for state, _ in found] for n, key in enumerate(keys)}
    names, state = [], {}
    for key in keys:
        described = _describe(key, by_key[key], ranks)
        for member in ranks[0].layout.parameters[key].members:
            names.append(member.names[0])
            if described is not None:
                state[member.names[0]] = described
    where = f"{ranks[0].label}: optimizer"
    options = {key: values.encode(value, f"{where}: {key}") for key, value in group.items()}
    return MatchedState(Optimizer("unknown", (Group(tuple(names), options),), state), by_key)


def _numbered(rank: Rank, count: int) -> tuple[Mapping[int, Mapping], Mapping[str, Any]]:
    """State by position, and the only group."""

    def fail(what: str) -> NoReturn:
        raise UnmatchedOptimizerError(
            f"{rank.label}: its optimizer state cannot be given to parameters with certainty: "
            f"{what}; consolidate without --optimizer"
        )

    found = rank.optimizer
    if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
        fail("'optimizer' is not the state_dict of a torch optimizer")
    state, groups = found["state"], found["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, list) or len(groups) != 1:
        fail("it has several parameter groups, which may be in any order")
    (group,) = groups
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
        fail("its parameter group lists no parameters")
    if len(group["params"]) != count or len(set(map(repr, group["params"]))) != count:
        fail(f"it has {len(group['params'])} parameters, the model has {count}")
    by_position = {}
    for position, number in enumerate(group["params"]):
        if number in state:
            by_position[position] = state[number]
    if len(by_position) != len(state) or not all(
        isinstance(each, Mapping) and all(isinstance(k, str) and "/" not in k for k in each)
        for each in by_position.values()
    ):
        fail("it has state of no parameter")
    return by_position, group


def _describe(key: str, states: list[Mapping[str, Any]], ranks: list[Rank]) -> State | None:
    """What the optimizer keeps for the tensor ``key``, checked to be the same on all ranks."""
    sharded: dict[str, str] = {}
    single: dict[str, Any] = {}
    for rank, state in zip(ranks, states, strict=True):
        where = f"{rank.label}: optimizer state of {key!r}"
        if state.keys() != states[0].keys():
            raise UnmatchedOptimizerError(f"{where}: has other keys than that of {ranks[0].label}")
        shard = rank.state_dict[key]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shard.shape and value.dim():
                dtype = dtype_name(value.dtype, f"{where}: {name!r}")
                if sharded.setdefault(name, dtype) == dtype and name not in single:
                    continue
            elif not isinstance(value, torch.Tensor) or value.dim() == 0:
                encoded = {"value": values.encode(value, f"{where}: {name!r}")}
                if isinstance(value, torch.Tensor):
                    encoded["on"] = "host"
                if single.setdefault(name, encoded) == encoded and name not in sharded:
                    continue
            raise UnmatchedOptimizerError(
                f"{where}: {name!r} has not the shape {list(shard.shape)} of the parameter's "
                f"shard, or is not the same as in {ranks[0].label}; consolidate without --optimizer"
            )
    return State(sharded, single) if states[0] else None
