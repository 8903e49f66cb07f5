"""State that an optimizer puts into words of its own, see :mod:`xla_fsdp.optim.saved`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..optim.saved import Made, SavesItself, saver_of
from ..sharding.sharded_parameter import on_local_parts
from .inventory import Held, Inventory
from .stored import Stored


@dataclass(frozen=True, eq=False)
class MemberValues:
    """A plain value of each parameter of the unsharded model that is in a tensor, or ``None``."""

    values: tuple[Any, ...]


def own_words(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, helds: list[Held]
) -> list[tuple[Held, Mapping[str, Any]]] | None:
    """What is to be saved of each of ``helds``, the parameters in ``parameter``; ``None`` where
    the optimizer leaves that to its state."""
    saver = saver_of(optimizer)
    if saver is None:
        return None
    state = optimizer.state.get(parameter)
    if not state:
        return []
    with on_local_parts():
        members = saver.saved_state(parameter, state)
    return [(held, members[number_in_holder(held)]) for held in helds]


def unsharded(held: Held) -> nn.Parameter:
    """Stands for the parameter of the unsharded model: its shape, on the CPU, and no memory."""
    return nn.Parameter(torch.zeros((), dtype=held.dtype).expand(held.shape), requires_grad=False)


def into_words(
    saver: SavesItself, state: Mapping[str, Mapping[str, Any]], inventory: Inventory, label: str
) -> dict[str, dict[str, Any]]:
    """What ``saver`` says of an unsharded optimizer's ``state``, by name; elements are read when
    they are asked for.

    Raises:
        ModelMismatchError: a parameter's is not as this kind of optimizer has it.
    """
    known = {name: held for held in inventory.parameters for name in held.names}
    found: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        if name not in known:
            found[name] = {}  # refused by who matches names
            continue
        whole = {k: v.whole() if isinstance(v, Stored) and v.shape else v for k, v in own.items()}
        try:
            (said,) = saver.saved_state(unsharded(known[name]), whole)
        except ValueError as error:
            raise ModelMismatchError(
                f"{label}: the state of {name!r} is not as this optimizer has it: {error}"
            ) from error
        found[name] = {
            key: _stored(value, known[name].shape) if isinstance(value, Made) else value
            for key, value in said.items()
        }
    return found


def _stored(made: Made, shape: tuple[int, ...]) -> Stored:
    def read(begin: int, end: int) -> torch.Tensor:
        return made.make().reshape(-1)[begin:end]

    return Stored(shape, made.dtype, read, here=True)


def number_in_holder(held: Held) -> int:
    """Which of the parameters in its holder it is; of a stack block by block."""
    if held.layout is None:
        return 0
    block = held.first // math.prod(held.layout.shard_shape) if held.first else 0
    return block * len(held.layout.members) + held.member


def by_number(members: list[Held], values: Mapping[Held, Any]) -> MemberValues:
    """``values`` in the order of :func:`number_in_holder`."""
    numbers = {number_in_holder(held): values.get(held) for held in members}
    return MemberValues(tuple(numbers.get(i) for i in range(max(numbers) + 1)))


__all__ = [
    "Made",
    "MemberValues",
    "SavesItself",
    "by_number",
    "into_words",
    "number_in_holder",
    "own_words",
    "saver_of",
    "unsharded",
]
