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
from .inventory import Held, Inventory
from .stored import Stored


@dataclass(frozen=True, eq=False)
class MemberValues:
    """One plain value, or ``None``, for each parameter of the unsharded model in one holder."""

    values: tuple[Any, ...]


def own_words(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, helds: list[Held]
) -> list[tuple[Held, Mapping[str, Any]]] | None:
    """The converted state of each of ``helds``, the parameters of the unsharded model in
    ``parameter``. ``None`` if the optimizer does not convert its state."""
    saver = state_converter_of(optimizer)
    if saver is None:
        return None
    state = optimizer.state.get(parameter)
    if not state:
        return []
    with on_local_parts():
        members = saver.saved_state(parameter, state)
    return [(held, members[number_in_holder(held)]) for held in helds]


def unsharded(held: Held) -> nn.Parameter:
    """A placeholder for the parameter of the unsharded model: it has the shape, on the CPU, and
    stores one element only."""
    return nn.Parameter(torch.zeros((), dtype=held.dtype).expand(held.shape), requires_grad=False)


def into_words(
    saver: StateConverter, state: Mapping[str, Mapping[str, Any]], inventory: Inventory, label: str
) -> dict[str, dict[str, Any]]:
    """Converts the ``state`` of an unsharded optimizer, by name. Elements are read on request.

    Raises:
        ModelMismatchError: the state of a parameter is not that of this kind of optimizer.
    """
    known = {name: held for held in inventory.parameters for name in held.names}
    found: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        if name not in known:
            found[name] = {}  # match_optimizer raises an error for unknown names
            continue
        full = {k: v.whole() if isinstance(v, Stored) and v.shape else v for k, v in own.items()}
        try:
            (converted,) = saver.saved_state(unsharded(known[name]), full)
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


def _stored(made: LazyState, shape: tuple[int, ...]) -> Stored:
    def read(begin: int, end: int) -> torch.Tensor:
        return made.make().reshape(-1)[begin:end]

    return Stored(shape, made.dtype, read, here=True)


def number_in_holder(held: Held) -> int:
    """The index of the parameter among those of its holder. A stack is counted block by block."""
    if held.layout is None:
        return 0
    block = held.first // math.prod(held.layout.shard_shape) if held.first else 0
    return block * len(held.layout.members) + held.member


def by_number(members: list[Held], values: Mapping[Held, Any]) -> MemberValues:
    """``values`` in the order of :func:`number_in_holder`."""
    numbers = {number_in_holder(held): values.get(held) for held in members}
    return MemberValues(tuple(numbers.get(i) for i in range(max(numbers) + 1)))


__all__ = [
    "LazyState",
    "MemberValues",
    "StateConverter",
    "by_number",
    "into_words",
    "number_in_holder",
    "own_words",
    "state_converter_of",
    "unsharded",
]
