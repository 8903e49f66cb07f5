"""The state dict of the unwrapped module, out of a sharded model and into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch_xla
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..consolidate.format.values import decode, encode
from ..names import dotted
from ..world import World
from .filling import LoadedKeys, fill_model, match_model
from .inventory import HeldBuffer
from .meeting import Meeting
from .parts import CPU, agreed_inventory, gather_members, parts_of
from .saving import at_rest
from .stored import Stored, describe, is_dense, sent_by_first_rank


@at_rest()
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
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)
    wanted = meeting.rank == 0 or not rank0_only
    to = (CPU if offload_to_cpu else torch_xla.device()) if wanted else None
    found: dict[str, Any] = {}
    for part in parts_of(inventory):
        whole = gather_members(part, part.holder, to)
        for held, value in zip(part.members, whole or (), strict=whole is not None):
            found.update(dict.fromkeys(held.names, value))
        del whole

    def add_rest() -> None:
        for buffer in inventory.buffers if wanted else ():
            found.update(dict.fromkeys(buffer.names, _buffer(buffer, to)))
        for name, module in inventory.extra_state.items() if wanted else ():
            found[name] = module.get_extra_state()

    meeting.together("gather the state of the model", add_rest)
    names = dict.fromkeys(name for name in _names(model) if name in found)
    return {name: found[name] for name in [*names, *(n for n in found if n not in names)]}


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
    first_only = only_first_has(meeting, state_dict, label)
    if first_only and meeting.rank:
        state_dict = None
    matched = []

    def match() -> Any:
        if state_dict is None:
            return None
        tensors, others = _sorted_out(state_dict)
        matched.append(match_model(inventory, tensors, others, label, strict))
        return _description(state_dict) if first_only else None

    described = meeting.together("load the full state dict", match)[0]
    if first_only:
        world = World.current()
        tensors = {
            name: sent_by_first_rank(world, about, None if state_dict is None else state_dict[name])
            for name, about in described["tensors"].items()
        }
        others = {name: decode(value, label) for name, value in described["others"].items()}
        matched = []

        def match_sent() -> None:
            matched.append(match_model(inventory, tensors, others, label, strict))

        meeting.together("match the full state dict", match_sent)
    meeting.together("load the full state dict", lambda: fill_model(inventory, matched[0]))
    return matched[0].keys


def only_first_has(meeting: Meeting, value: Any, label: str) -> bool:
    """Whether ``value`` is there on rank 0, but not on every rank.

    Raises:
        ValueError: rank 0 has none.
    """
    having = meeting.gather(f"who has {label}", value is not None)
    if not having[0]:
        raise ValueError(f"{label} is None on rank 0; give it on rank 0 or on every rank")
    return not all(having)


def _sorted_out(state_dict: Mapping[str, Any]) -> tuple[dict[str, Stored], dict[str, Any]]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    seen: dict[int, Stored] = {}
    tensors, others = {}, {}
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise ModelMismatchError(f"state_dict: has the key {name!r:.80}, expected names")
        if isinstance(value, torch.Tensor):
            if not is_dense(value):
                raise ModelMismatchError(
                    f"state_dict: {name!r:.120} is no dense tensor with values"
                )
            # Tied parameters are one object; what is not need be compared.
            tensors[name] = seen.setdefault(id(value), Stored.of(value))
        else:
            others[name] = value
    return tensors, others


def _description(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    tensors, others = {}, {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = describe(value, f"state_dict[{name!r}]")
        else:
            others[name] = encode(value, f"state_dict[{name!r}]")
    return {"tensors": tensors, "others": others}


def _buffer(buffer: HeldBuffer, to: torch.device) -> torch.Tensor:
    # To the CPU first: on the device every row would be a program of its own.
    value = buffer.tensor.detach().cpu()
    if buffer.row is not None:
        value = value[buffer.row]
    value = value.to(buffer.restore or value.dtype)
    return value.clone() if to == CPU else value.to(to)


def _names(model: nn.Module, path: str = "") -> Iterator[str]:
    """Names in the order of ``state_dict()`` of the unwrapped module."""
    unit = model.__dict__.get("_unit")
    if unit is not None and hasattr(unit, "template"):  # scanned: no modules of their own
        for number in range(unit.depth):
            yield from _names(unit.template, dotted(path, str(number)))
        return
    if unit is not None:
        yield from _names(model.module, path)
        return
    for name in [*model._parameters, *model._buffers, "_extra_state"]:
        yield dotted(path, name)
    for name, module in model._modules.items():
        if module is not None:
            yield from _names(module, dotted(path, name))
