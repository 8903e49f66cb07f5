"""The state dict of the unwrapped module, out of a sharded model and into one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch_xla
from torch import nn

from ..collectives.random_state import at_rest
from ..collectives.world import World
from ..sharding.state import units_in
from ..sharding.user_checks import require_values
from ..tree import map_tensors, tensors_in
from .filling import fill_model
from .inventory import Held
from .matching import LoadedKeys, Match, match_model
from .meeting import Meeting
from .parts import CPU, agreed_inventory, gather_members, parts_of
from .protocol import (
    copied_buffer,
    full_values,
    offered_by_load,
    state_dict_of,
    unread_state_dict,
)
from .stored import describe, sent_by_first_rank
from .unread import UnreadTensor

T = TypeVar("T")


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, offload_to_cpu: bool = True
) -> dict[str, Any]:
    """What ``state_dict()`` of the unwrapped module would return; must be called on every rank.

    Keys and values are those of torch's ``state_dict()``, with everything that the module does in
    it: overridden methods, hooks, extra state. It runs on the ranks that get the result; the others
    get ``{}``. Parameters are in the dtype in which they are stored, buffers in the one they had
    before wrapping and with the values of the rank that gets them.

    Parameters are gathered one sharded tensor at a time: beyond the result, one is full in memory
    (with ``flatten_parameters`` one vector of a wrapper). What is left out is not gathered. If a
    hook or method computes with values, it is called again, with all parameters in memory.

    Args:
        rank0_only: only rank 0 gets the result. ``False``: every rank; on a host with several
            ranks it is there as often.
        offload_to_cpu: tensors are on the CPU. ``False``: on the rank's XLA device.

    Raises:
        TypeError, ValueError: ``model`` is no module, has parameters on the meta device, or is
            sharded over groups whose copies may differ.
        MetadataMismatchError: ranks have different models.
    """
    return gather_state(model, lambda name: True, rank0_only, offload_to_cpu)


@at_rest()
def gather_state(
    model: nn.Module,
    wanted: Callable[[str], bool],
    rank0_only: bool,
    offload_to_cpu: bool,
    path: str = "",
) -> dict[str, Any]:
    """What :func:`full_state_dict` returns, of it what has a name that is ``wanted``.

    ``path``: of the module of that name in ``model``, names as seen from it.
    Parameters with other names are not gathered, unless a hook computes with values.
    """
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)
    require_values(units_in(model), "full_state_dict came")
    getting = meeting.rank == 0 or not rank0_only
    to = (CPU if offload_to_cpu else torch_xla.device()) if getting else None
    parts = parts_of(inventory)
    number_of = {held: number for number, part in enumerate(parts) for held in part.members}
    states: list[dict[str, Any]] = []

    def keep(state: Mapping[str, Any]) -> None:
        mine = copy.copy(state) if isinstance(state, dict) else dict(state)
        for name in list(mine):
            if not wanted(name):
                del mine[name]
        states[:] = [mine]

    def call_unread() -> list[int] | None:
        """Which parts that needs; ``None`` if values."""
        if to is None:
            return []
        state = unread_state_dict(model, inventory, path)
        if state is None:
            return None
        keep(state)
        sources = (one.source for one in tensors_in(states) if isinstance(one, UnreadTensor))
        return sorted({number_of[one] for one in sources if isinstance(one, Held)})

    what = "call state_dict() of the unwrapped module"
    needed = meeting.together(what, call_unread)
    values: dict[Any, torch.Tensor] = {}
    if None in needed:
        values = full_values(inventory, to)
        meeting.together(
            what, lambda: None if to is None else keep(state_dict_of(model, values, path))
        )
    else:
        for number in sorted(set().union(*needed)):
            part, mine = parts[number], number in needed[meeting.rank]
            whole = gather_members(part, part.holder, to if mine else None)
            values.update(zip(part.members, whole or (), strict=whole is not None))
            del whole

    def resolved(tensor: torch.Tensor) -> torch.Tensor:
        assert to is not None
        if not isinstance(tensor, UnreadTensor):
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

    return meeting.each("gather the state of the model", resolve)


@at_rest()
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> LoadedKeys:
    """Loads a state dict of the unwrapped module; must be called on every rank.

    What torch's ``load_state_dict()`` of the unwrapped module takes from it is loaded: overridden
    methods and hooks run, on the ranks that have the state dict. If one computes with parameters,
    it is called again, on full ones, which are all in memory of these ranks then.

    Every rank cuts its own part, one parameter at a time. If only rank 0 has the state dict, the
    others pass ``None``, and get it through a collective in blocks of at most 16 MiB. Parameters
    stay the same objects, so that the optimizer keeps them. All is checked before anything is
    changed.

    Args:
        state_dict: may lack all but one of the names of a tied parameter. Floating-point tensors
            are cast to the dtype of the parameter.
        strict: names must be those of the model. ``False``: what fits is loaded.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``.

    Raises:
        ModelMismatchError: names, shapes or dtypes do not fit the model.
        Exception: what a hook raises.
        ValueError: rank 0 has no state dict, or ``model`` cannot be loaded into.
        UnsupportedValueError: extra state that rank 0 cannot send.
        OtherRankError: one of these on another rank.
    """
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)
    label = "state_dict"

    offered = offered_by_load(
        meeting, model, inventory, label, f"match {label}", lambda: state_dict
    )

    def match(found: dict[str, Any]) -> Match:
        reported = LoadedKeys(found["missing"], found["unexpected"])
        return match_model(inventory, found["values"], label, strict, reported=reported)

    matched = match_given(meeting, label, offered, vars, match)
    meeting.together(f"load {label}", lambda: fill_model(inventory, matched))
    return matched.keys


def match_given(
    meeting: Meeting,
    label: str,
    given: Any,
    look: Callable[[Any], dict[str, Any]],
    match: Callable[[dict[str, Any]], T],
) -> T:
    """Matches what is given on every rank, or else what rank 0 sends of it.

    ``look`` makes of it what ``match`` takes, with tensors as :class:`~.stored.Stored`; ``label``
    is what it is, for messages.

    Raises:
        ValueError: rank 0 has none.
        Exception: what the functions raise; :class:`OtherRankError` on the other ranks.
    """
    having = meeting.gather(f"who has {label}", given is not None)
    if not having[0]:
        raise ValueError(f"{label} is None on rank 0; give it on rank 0 or on every rank")
    looked: dict[str, Any] = {}
    matched: list[T] = []

    def match_own() -> Any:
        if meeting.rank and not all(having):
            return None
        looked.update(look(given))
        matched.append(match(looked))
        return None if all(having) else describe(looked, label)

    def match_sent() -> T:
        return match(sent_by_first_rank(World.current(), described, looked or None, label))

    described = meeting.together(f"match {label}", match_own)[0]
    return matched[0] if all(having) else meeting.each(f"match rank 0's {label}", match_sent)
