"""Values that ranks exchange once, before the first step, each in a separate program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from .. import xlac
from ..ranks.rank import is_simulated_rank
from .host_data import as_data
from .random_state import preserve_random_state
from .world import World


def all_gather_object(world: World, tag: str, value: Any) -> list[Any] | None:
    """Sends a small picklable ``value`` to all ranks; all must call it.

    Returns the values of all ranks, in the order of ranks. On CPU ranks only the last rank to call
    gets them, and the others get ``None``: no rank waits, since ranks may trace one after another.
    """
    if world.context is not None:
        return world.context.post(tag, value)
    with preserve_random_state():
        values: list[Any] = xm.mesh_reduce(tag, value, list)  # type: ignore[assignment]
    return values


def broadcast_from_first(world: World, value: torch.Tensor) -> torch.Tensor:
    """``value`` of the group's first rank, and of the first replica, on this rank's device.

    Internally a sum: the first rank contributes its value and all others zeros. A separate
    program, since a rank that does not use the result must take part as well.
    """
    if is_simulated_rank():
        return value
    result = value.to(torch.uint8) if value.dtype is torch.bool else value.detach()
    result = as_data(result.cpu(), world.device)
    ordinal = xr.global_ordinal()
    first_replica = all(ordinal not in group[1:] for group in world.replica_groups)
    firsts = [(world.all_reduce_sum, world.rank == 0)]
    if world.replica_groups:
        firsts.append((world.sum_over_replicas, first_replica))
    with _separate_program(world):
        for add, first in firsts:
            mine = as_data(torch.tensor(first), world.device)  # 0-d, as the value may be
            result = add(torch.where(mine, result, torch.zeros_like(result)), "from the first")
        result = result.to(value.dtype)
        xlac.start_tensors([result])
    return result


@contextlib.contextmanager
def _separate_program(world: World) -> Iterator[None]:
    """On CPU ranks: separates a program from earlier collectives. torch_xla's token would include
    these in the program, which would then be a different one every time."""
    if world.context is None:
        yield
        return
    with world.context.separate_channels():
        yield
