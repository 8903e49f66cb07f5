"""Saves and loads state of optimizers that convert their state, see :mod:`xla_fsdp.optim.saved`.

Such an optimizer (Adafactor, 8-bit AdamW) has state that does not have the shape of the parameter.
It implements :class:`StateConverter`, which converts the state into values that can be resharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..optim.saved import LazyState, StateConverter, state_converter_of
from ..sharding.sharded_parameter import on_local_parts
from .inventory import Inventory, ParameterShard
from .readable_tensor import ReadableTensor


@dataclass(frozen=True, eq=False)
class MemberValues:
    """One plain value, or ``None``, for each parameter of the unsharded model in one holder."""

    values: tuple[Any, ...]


def convert_state_to_save(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, shards: list[ParameterShard]
) -> list[tuple[ParameterShard, Mapping[str, Any]]] | None:
    """The converted state of each of ``shards``, the parameters of the unsharded model in
    ``parameter``. ``None`` if the optimizer does not convert its state."""
    saver = state_converter_of(optimizer)
    if saver is None:
        return None
    state = optimizer.state.get(parameter)
    if not state:
        return []
    with on_local_parts():
        members = saver.saved_state(parameter, state)
    return [(shard, members[number_in_holder(shard)]) for shard in shards]


def unsharded_placeholder(shard: ParameterShard) -> nn.Parameter:
    """A placeholder for the parameter of the unsharded model: it has the shape, on the CPU, and
    stores one element only."""
    return nn.Parameter(torch.zeros((), dtype=shard.dtype).expand(shard.shape), requires_grad=False)


def convert_state_to_load(
    saver: StateConverter, state: Mapping[str, Mapping[str, Any]], inventory: Inventory, label: str
) -> dict[str, dict[str, Any]]:
    """Converts the ``state`` of an unsharded optimizer, by name. Elements are read on request.

    Raises:
        ModelMismatchError: the state of a parameter is not that of this kind of optimizer.
    """
    known = {name: shard for shard in inventory.parameters for name in shard.names}
    found: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        if name not in known:
            found[name] = {}  # match_optimizer raises an error for unknown names
            continue
        full = {
            k: v.read_full() if isinstance(v, ReadableTensor) and v.shape else v
            for k, v in own.items()
        }
        try:
            (converted,) = saver.saved_state(unsharded_placeholder(known[name]), full)
        except ValueError as error:
            raise ModelMismatchError(
                f"{label}: the state of {name!r} is not as this optimizer has it: {error}. Load "
                "it into the kind of optimizer that saved it."
            ) from error
        found[name] = {
            key: _stored(value, known[name].shape) if isinstance(value, LazyState) else value
            for key, value in converted.items()
        }
    return found


def _stored(made: LazyState, shape: tuple[int, ...]) -> ReadableTensor:
    def read(begin: int, end: int) -> torch.Tensor:
        return made.make().reshape(-1)[begin:end]

    return ReadableTensor(shape, made.dtype, read, in_memory=True)


def number_in_holder(shard: ParameterShard) -> int:
    """The index of the parameter among those of its holder. A stack is counted block by block."""
    if shard.layout is None:
        return 0
    block = shard.first // math.prod(shard.layout.shard_shape) if shard.first else 0
    return block * len(shard.layout.members) + shard.member


def by_number(members: list[ParameterShard], values: Mapping[ParameterShard, Any]) -> MemberValues:
    """``values`` in the order of :func:`number_in_holder`."""
    numbers = {number_in_holder(shard): values.get(shard) for shard in members}
    return MemberValues(tuple(numbers.get(i) for i in range(max(numbers) + 1)))


__all__ = [
    "LazyState",
    "MemberValues",
    "StateConverter",
    "by_number",
    "convert_state_to_load",
    "number_in_holder",
    "convert_state_to_save",
    "state_converter_of",
    "unsharded_placeholder",
]
