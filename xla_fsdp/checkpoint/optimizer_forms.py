"""State that an optimizer puts into words of its own, see :mod:`xla_fsdp.optim.saved`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..optim.saved import Made, SavesItself
from .inventory import Held


@dataclass(frozen=True, eq=False)
class MemberValues:
    """A plain value of each parameter of the unsharded model that is in a tensor, or ``None``."""

    values: tuple[Any, ...]


def own_words(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, helds: list[Held]
) -> list[tuple[Held, Mapping[str, Any]]] | None:
    """What is to be saved of each of ``helds``, the parameters in ``parameter``; ``None`` where
    the optimizer leaves that to its state."""
    if not isinstance(optimizer, SavesItself):
        return None
    if not optimizer.state.get(parameter):
        return []
    members = optimizer.saved_state(parameter)
    return [(held, members[number_in_holder(held)]) for held in helds]


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


__all__ = ["Made", "MemberValues", "SavesItself", "by_number", "number_in_holder", "own_words"]
