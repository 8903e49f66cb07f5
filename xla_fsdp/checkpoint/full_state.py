"""Gathers the full (unsharded) state dict of a sharded model, and loads one into it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch_xla
from torch import nn

from ..collectives.random_state import synced_device
from ..collectives.world import World
from ..sharding.state import units_in
from ..sharding.user_checks import require_values
from ..tree import map_tensors, tensors_in
from .inventory import ParameterShard
from .matching import LoadedKeys, Match, match_model
from .parts import CPU, agree_on_inventory, gather_members, parts_of
from .placeholder_tensor import PlaceholderTensor
from .protocol import (
    capture_loaded_values,
    copied_buffer,
    full_values,
    placeholder_state_dict,
    state_dict_of,
)
from .rank_exchange import RankExchange
from .readable_tensor import describe, sent_by_first_rank
from .value_loading import load_model_values

T = TypeVar("T")


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, offload_to_cpu: bool = True
) -> dict[str, Any]:
    """Returns what ``state_dict()`` of the unwrapped module returns. Call it on every rank.

    Keys and values are those of torch's ``state_dict()``, including the effects of overridden
    methods, hooks and extra state. That code runs on the ranks that get the result; the other ranks
    get ``{}``. Parameters have the dtype in which they are stored. Buffers have the dtype from
    before wrapping, and the values of the rank that returns them.

    Parameters are gathered one sharded tensor at a time. In addition to the result, memory holds
    one full tensor (with ``flatten_parameters``, one vector of a wrapper). Parameters that the
    state dict leaves out are not gathered. If a hook or method computes with values, it is called a
    second time, with all full parameters in memory.

    Args:
        rank0_only: only rank 0 gets the result. ``False``: every rank gets it. Then a host with
            several ranks has one copy in memory for each of its ranks.
        offload_to_cpu: tensors are on the CPU. ``False``: on the rank's XLA device.

    Raises:
        TypeError, ValueError: ``model`` is not a module, has parameters on the meta device, or is
            sharded over groups whose copies may differ.
        MetadataMismatchError: the ranks have different models.
    """
    return gather_state(model, lambda name: True, rank0_only, offload_to_cpu)


@synced_device()
def gather_state(
    model: nn.Module,
    wanted: Callable[[str], bool],
    rank0_only: bool,
    offload_to_cpu: bool,
    path: str = "",
) -> dict[str, Any]:
    """Returns the entries of :func:`full_state_dict` for whose name ``wanted`` is true.

    ``path``: name of a module in ``model``. The result is then the state dict of that module, and
    names are relative to it. Parameters with other names are not gathered, unless a hook computes
    with values.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    require_values(units_in(model), "full_state_dict was called")
    getting = exchange.rank == 0 or not rank0_only
    to = (CPU if offload_to_cpu else torch_xla.device()) if getting else None
    parts = parts_of(inventory)
    number_of = {shard: number for number, part in enumerate(parts) for shard in part.members}
    states: list[dict[str, Any]] = []

    def keep(state: Mapping[str, Any]) -> None:
        mine = copy.copy(state) if isinstance(state, dict) else dict(state)
        for name in list(mine):
            if not wanted(name):
                del mine[name]
        states[:] = [mine]

    def call_with_placeholders() -> list[int] | None:
        """Calls ``state_dict()`` without values. Returns the numbers of the parts to gather, or
        ``None`` if ``state_dict()`` needs values."""
        if to is None:
            return []
        state = placeholder_state_dict(model, inventory, path)
        if state is None:
            return None
        keep(state)
        sources = (one.source for one in tensors_in(states) if isinstance(one, PlaceholderTensor))
        return sorted({number_of[one] for one in sources if isinstance(one, ParameterShard)})

    what = "call state_dict() of the unwrapped module"
    needed = exchange.run_and_gather(what, call_with_placeholders)
    values: dict[Any, torch.Tensor] = {}
    if None in needed:
        values = full_values(inventory, to)
        exchange.run_and_gather(
            what, lambda: None if to is None else keep(state_dict_of(model, values, path))
        )
    else:
        for number in sorted(set().union(*needed)):
            part, mine = parts[number], number in needed[exchange.rank]
            full = gather_members(part, part.holder, to if mine else None)
            values.update(zip(part.members, full or (), strict=full is not None))
            del full

    def resolved(tensor: torch.Tensor) -> torch.Tensor:
        assert to is not None
        if not isinstance(tensor, PlaceholderTensor):
            return tensor.to(to)
        if tensor.source not in values:
            values[tensor.source] = copied_buffer(tensor.source, to)
        return values[tensor.source]

    def resolve() -> dict[str, Any]:
        if to is None:
            return {}
        for name, value in states[0].items():
            states[0][name] = map_tensors(resolved, value)
        return states[0]

    return exchange.run_on_each_rank("gather the model state", resolve)


@synced_device()
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> LoadedKeys:
    """Loads a full (unsharded) state dict into a sharded model. Call it on every rank.

    The result is that of torch's ``load_state_dict()`` of the unwrapped module: overridden methods
    and hooks run, on the ranks that have the state dict. If one of them computes with parameters,
    it is called a second time, with all full parameters in the memory of these ranks.

    Every rank takes its own part, one parameter at a time. If only rank 0 has the state dict, the
    other ranks pass ``None`` and receive it through collectives, in blocks of at most 16 MiB.
    Parameters stay the same objects, so optimizers remain valid. Everything is checked before
    anything is changed.

    Args:
        state_dict: for a tied parameter, one of its names is enough. Floating-point tensors are
            cast to the dtype of the parameter.
        strict: ``True`` requires that the names are those of the model. ``False`` loads the tensors
            whose names match, and reports the others.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict`` returns them.

    Raises:
        ModelMismatchError: names, shapes or dtypes do not match the model.
        Exception: any exception that a hook raises.
        ValueError: ``state_dict`` is ``None`` on rank 0, or ``model`` cannot be loaded into (see
            :func:`full_state_dict`).
        UnsupportedValueError: rank 0 cannot send an extra state.
        OtherRankError: another rank raised one of these.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    label = "state_dict"

    offered = capture_loaded_values(
        exchange, model, inventory, label, f"match {label}", lambda: state_dict
    )

    def match(found: dict[str, Any]) -> Match:
        reported = LoadedKeys(found["missing"], found["unexpected"])
        return match_model(inventory, found["values"], label, strict, reported=reported)

    matched = match_given(exchange, label, offered, vars, match)
    exchange.run_and_gather(f"load {label}", lambda: load_model_values(inventory, matched))
    return matched.keys


def match_given(
    exchange: RankExchange,
    label: str,
    given: Any,
    look: Callable[[Any], dict[str, Any]],
    match: Callable[[dict[str, Any]], T],
) -> T:
    """Matches ``given`` if every rank has it, or else the values that rank 0 sends.

    ``look`` converts ``given`` into the argument of ``match``, with tensors as
    :class:`~.readable_tensor.ReadableTensor`. ``label`` names ``given`` in messages.

    Raises:
        ValueError: ``given`` is ``None`` on rank 0.
        Exception: any exception of the functions; :class:`OtherRankError` on the other ranks.
    """
    having = exchange.gather_values(f"who has {label}", given is not None)
    if not having[0]:
        raise ValueError(f"{label} is None on rank 0. Pass it on rank 0 or on every rank.")
    looked: dict[str, Any] = {}
    matched: list[T] = []

    def match_own() -> Any:
        if exchange.rank and not all(having):
            return None
        looked.update(look(given))
        matched.append(match(looked))
        return None if all(having) else describe(looked, label)

    def match_sent() -> T:
        return match(sent_by_first_rank(World.current(), described, looked or None, label))

    described = exchange.run_and_gather(f"match {label}", match_own)[0]
    return (
        matched[0]
        if all(having)
        else exchange.run_on_each_rank(f"match rank 0's {label}", match_sent)
    )
