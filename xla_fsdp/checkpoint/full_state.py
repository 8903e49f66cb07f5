"""The state dict of the unwrapped module, out of a sharded model and into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch_xla
from torch import nn

from ..collectives.random_state import at_rest
from ..collectives.world import World
from ..consolidate.errors import ModelMismatchError
from ..names import WRAPPED, dotted
from ..sharding.first_step import require_values
from .filling import fill_model
from .matching import LoadedKeys, Match, match_model
from .meeting import Meeting
from .parts import CPU, agreed_inventory, gather_members, parts_of
from .stored import Stored, describe, is_dense, sent_by_first_rank

T = TypeVar("T")


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, offload_to_cpu: bool = True
) -> dict[str, Any]:
    """What ``state_dict()`` of the unwrapped module would return; must be called on every rank.

    Every parameter is there under each of its names, tied ones as one tensor; parameters in the
    dtype in which they are stored, buffers in the one they had before wrapping. Buffers are those
    of the rank that gets them. Other ranks get ``{}``.

    Parameters are gathered one sharded tensor at a time: beyond the result, one is full in memory
    (with ``flatten_parameters`` one vector of a wrapper).

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
    model: nn.Module, wanted: Callable[[str], bool], rank0_only: bool, offload_to_cpu: bool
) -> dict[str, Any]:
    """What :func:`full_state_dict` returns, of it what has a name that is ``wanted``.

    Parameters of which no name is wanted are not gathered, unless one vector has others.
    """
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)
    require_values(model, "full_state_dict came")
    getting = meeting.rank == 0 or not rank0_only
    to = (CPU if offload_to_cpu else torch_xla.device()) if getting else None
    found: dict[str, Any] = {}
    for part in parts_of(inventory):
        if not any(wanted(name) for held in part.members for name in held.names):
            continue
        whole = gather_members(part, part.holder, to)
        for held, value in zip(part.members, whole or (), strict=whole is not None):
            found.update(dict.fromkeys(held.names, value))
        del whole

    def add_rest() -> None:
        if to is None:
            return
        for buffer in inventory.buffers:
            if not any(map(wanted, buffer.names)):
                continue
            value = buffer.value()
            value = value.clone() if to == CPU else value.to(to)
            found.update(dict.fromkeys(buffer.names, value))
        for name, module in inventory.extra_state.items():
            found[name] = module.get_extra_state()

    meeting.together("gather the state of the model", add_rest)
    names = dict.fromkeys(name for name in _names(model) if name in found)
    order = [*names, *(name for name in found if name not in names)]
    return {name: found[name] for name in order if wanted(name)}


@at_rest()
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> LoadedKeys:
    """Loads a state dict of the unwrapped module; must be called on every rank.

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
        ValueError: rank 0 has no state dict, or ``model`` cannot be loaded into.
        UnsupportedValueError: extra state that rank 0 cannot send.
        OtherRankError: one of these on another rank.
    """
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)
    label = "state_dict"

    def match(offered: dict[str, Any]) -> Match:
        return match_model(inventory, offered, label, strict)

    matched = match_given(meeting, label, state_dict, _offered, match)
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


def _offered(state_dict: Any) -> dict[str, Any]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    seen: dict[int, Stored] = {}
    offered: dict[str, Any] = {}
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise ModelMismatchError(f"state_dict: has the key {name!r:.80}, expected names")
        if isinstance(value, torch.Tensor):
            if not is_dense(value):
                raise ModelMismatchError(
                    f"state_dict: {name!r:.120} is no dense tensor with values"
                )
            # Tied parameters are one object; what is not need be compared.
            value = seen.setdefault(id(value), Stored.of(value))
        offered[name] = value
    return offered


def _names(model: nn.Module, path: str = "") -> Iterator[str]:
    """Names in the order of ``state_dict()`` of the unwrapped module."""
    unit = model.__dict__.get("_unit")
    if unit is not None and hasattr(unit, "template"):  # scanned: no modules of their own
        for number in range(unit.depth):
            yield from _names(unit.template, dotted(path, str(number)))
        return
    inner = model._modules.get(WRAPPED)
    if inner is not None:
        yield from _names(inner, path)
        return
    for name in [*model._parameters, *model._buffers, "_extra_state"]:
        yield dotted(path, name)
    for name, child in model._modules.items():
        if child is not None:
            yield from _names(child, dotted(path, name))
