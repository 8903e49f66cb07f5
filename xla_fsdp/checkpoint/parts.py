"""Parameters put together again, one collective at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch_xla
from torch import nn

from ..collectives.world import World
from ..sharding.layout import Layout
from ..sharding.sharded_parameter import local
from .inventory import Held, Inventory, take_inventory
from .meeting import Meeting

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Part:
    """What one collective gathers: the parameters in one sharded tensor, or an unsharded one."""

    holder: nn.Parameter
    members: tuple[Held, ...]

    @property
    def layout(self) -> Layout | None:
        return self.members[0].layout

    @property
    def world(self) -> World | None:
        return self.members[0].world


def parts_of(inventory: Inventory) -> list[Part]:
    """All parameters, in the order of the unsharded model as far as they do not share a tensor."""
    found: dict[tuple, list[Held]] = {}
    for held in inventory.parameters:
        found.setdefault((held.holder, held.first), []).append(held)
    return [Part(holder, tuple(members)) for (holder, _), members in found.items()]


def agreed_inventory(meeting: Meeting, model: nn.Module) -> Inventory:
    """The inventory of ``model``; raises on every rank if any has another model.

    Raises:
        TypeError, ValueError: see :func:`take_inventory`.
        MetadataMismatchError: the models of two ranks differ.
    """
    taken: list[Inventory] = []

    def take() -> str:
        taken.append(take_inventory(model))
        told: list[tuple] = [
            (h.names, h.shape, str(h.dtype), h.layout, h.first) for h in taken[0].parameters
        ]
        told += [(b.names, b.shape, str(b.tensor.dtype), b.row) for b in taken[0].buffers]
        return hashlib.sha256(repr([told, list(taken[0].extra_state)]).encode()).hexdigest()

    meeting.alike(
        "look at its model",
        take,
        "rank {rank} has another model than rank 0: names, shapes, dtypes and wrapping of all "
        "parameters and buffers must be equal on every rank",
    )
    return taken[0]


def gather_members(
    part: Part, value: torch.Tensor, to: torch.device | None
) -> list[torch.Tensor] | None:
    """The full tensors of ``part.members``, from ``value``, of which every rank has its shard.

    ``value`` is the holder or has its shape. Every rank must call this; those that pass ``None``
    for ``to`` take part and keep nothing. No more than this one part is full at a time, on any
    device.
    """
    value = local(value).detach()
    if part.layout is None:
        return None if to is None else [_copied(value, to)]
    full = _gather(part, value)
    if to is None:
        return None
    if to != CPU:
        members = part.layout.split(full)
        torch_xla.sync(wait=True)
        return [members[held.member] for held in part.members]
    # Padding is at the end in both layouts, so members are runs of the flattened whole.
    flat = full.cpu().view(-1)
    whole = []
    for held in part.members:
        offset = part.layout.members[held.member].offset
        piece = flat[offset : offset + held.numel].view(held.shape)
        whole.append(piece if held.numel == flat.numel() else piece.clone())
    return whole


def _gather(part: Part, value: torch.Tensor) -> torch.Tensor:
    layout, world = part.layout, part.world
    assert layout is not None and world is not None  # it is sharded
    count = torch.Size(layout.shard_shape).numel()
    shard = value.to(world.device)
    if count == 0:
        return shard.new_zeros(layout.padded_shape)
    if shard.numel() != count:  # one of stacked blocks; a number in the program would make it new
        block = torch.tensor([part.members[0].first // count]).to(world.device)
        shard = torch.index_select(shard.view(-1, count), 0, block)
    full = world.all_gather(shard.view(layout.wire_shape), part.members[0].name)
    del shard
    torch_xla.sync(wait=True)
    return full


def _copied(value: torch.Tensor, to: torch.device) -> torch.Tensor:
    return value.clone() if to != CPU or value.device == CPU else value.cpu()
