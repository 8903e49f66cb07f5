"""Copies matched tensors into a model and its optimizer. Every rank reads its own part."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn

from ..optim.saved import state_converter_of
from ..sharding.deferred_values import begin_load, end_load
from ..sharding.freeing import assign_
from ..sharding.layout import spec_of
from ..sharding.optimizer_hook import state_is_by_name
from ..sharding.sharded_parameter import as_sharded, local, on_local_parts
from .inventory import CPU, Inventory
from .matching import HolderState, Match, Number, OptimizerMatch
from .optimizer_state import options
from .readable_tensor import ReadableTensor, read_holder_values


def load_model_values(inventory: Inventory, match: Match) -> None:
    for pair in iterate_new_values(inventory, match):
        set_tensor_values([pair])
    for module, state in match.extra_state.items():
        module.set_extra_state(state)


def load_optimizer_values(match: OptimizerMatch) -> None:
    optimizer, saver = match.optimizer, state_converter_of(match.optimizer)
    state_is_by_name(optimizer)
    devices = {
        key: value.device
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() == 0
    }
    for group, new in zip(optimizer.param_groups, match.groups, strict=True):
        if new is not None:
            for name in options(group).keys() - new.keys():
                del group[name]
        for name, value in (new or {}).items():
            current = group.get(name)
            if value is current:
                continue
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                value = value.to(current.device)
            group[name] = copy.deepcopy(value)
        prefers_device = bool(group.get("capturable") or group.get("fused"))
        for holder in group["params"]:
            if holder not in match.state:
                optimizer.state.pop(holder, None)
                continue
            if saver is not None:
                saved = {
                    key: value.value if isinstance(value, Number) else _value_of(value)
                    for key, value in match.state[holder].items()
                }
                with on_local_parts():
                    optimizer.state[holder] = saver.load_saved_state(holder, saved, group)
                continue
            spec, state = spec_of(holder), {}
            for key, value in match.state[holder].items():
                if isinstance(value, Number):
                    state[key] = _move_number(value, holder, devices.get(key), prefers_device)
                else:
                    moved = _value_of(value).to(holder.device)
                    state[key] = moved if spec is None else as_sharded(moved, spec)
            optimizer.state[holder] = state
    numbers = [v for own in match.state.values() for v in own.values() if isinstance(v, Number)]
    if saver is None and not all(isinstance(one.value, torch.Tensor) for one in numbers):
        # As in torch, the optimizer converts old state, whose steps were no tensors.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def read_to_host(match: OptimizerMatch) -> OptimizerMatch:
    """Reads all values to the host, so that :func:`load_optimizer_values` cannot fail then."""
    state: dict[nn.Parameter, HolderState] = {
        holder: {key: _value_of(value) for key, value in own.items()}
        for holder, own in match.state.items()
    }
    return replace(match, state=state)


def iterate_new_values(
    inventory: Inventory, match: Match
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each tensor to change and its new value, which is read on request."""
    for holder, members in inventory.by_holder().items():
        found = {shard: match.parameters.get(shard) for shard in members}
        if any(found.values()):
            begin_load(holder, ((h.first, h.member) for h, stored in found.items() if stored))
            start = None if all(found.values()) else holder
            yield holder, read_holder_values(local(holder).shape, holder.dtype, found, start)
    rows: dict[torch.Tensor, list[tuple[int, ReadableTensor]]] = {}
    for buffer, stored in match.buffers.items():
        if buffer.row is None:
            yield buffer.tensor, stored.read_full().to(buffer.tensor.dtype)
        else:
            rows.setdefault(buffer.tensor, []).append((buffer.row, stored))
    for tensor, each in rows.items():
        value = tensor.detach().cpu().clone()
        for row, stored in each:
            value[row] = stored.read_full()
        yield tensor, value


def set_tensor_values(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Sets values of the same shape, all copied to the device first. Compiles no program."""
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    on_device = [pair for pair in pairs if pair[0].device.type == "xla"]
    for device in {tensor.device for tensor, _ in on_device}:
        here = [pair for pair in on_device if pair[0].device == device]
        arrived: Any = xm.send_cpu_data_to_device([value for _, value in here], device)
        moved += [(tensor, value) for (tensor, _), value in zip(here, arrived, strict=True)]
    assign_([tensor for tensor, _ in moved], [value for _, value in moved])
    for tensor, _ in moved:
        end_load(tensor)
    with torch.no_grad(), on_local_parts():
        for tensor, value in pairs:
            if tensor.device.type != "xla":
                tensor.copy_(value)
                end_load(tensor)


def _value_of(value: Any) -> Any:
    return value() if callable(value) else value


def _move_number(
    number: Number, holder: nn.Parameter, present: torch.device | None, prefers_device: bool
) -> Any:
    """The value on the kind of device that it was saved from, else on the optimizer's."""
    if not isinstance(number.value, torch.Tensor):
        return copy.deepcopy(number.value)
    if number.on_device is not None:
        present, prefers_device = None, number.on_device
    device = present or (holder.device if prefers_device else CPU)
    return number.value.detach().to(device, copy=True)
