"""Gathers full (unsharded) parameters, one collective at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch_xla
from torch import nn

from ..collectives.world import World
from ..sharding.layout import Layout
from ..sharding.sharded_parameter import local
from .inventory import Inventory, ParameterShard, make_inventory
from .rank_exchange import RankExchange

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Part:
    """The parameters that one collective gathers: those in one sharded tensor, or one unsharded."""

    holder: nn.Parameter
    members: tuple[ParameterShard, ...]

    @property
    def layout(self) -> Layout | None:
        return self.members[0].layout

    @property
    def world(self) -> World | None:
        return self.members[0].world


def parts_of(inventory: Inventory) -> list[Part]:
    """Groups all parameters by the tensor they are in, in the order of the unsharded model."""
    found: dict[tuple, list[ParameterShard]] = {}
    for shard in inventory.parameters:
        found.setdefault((shard.holder, shard.first), []).append(shard)
    return [Part(holder, tuple(members)) for (holder, _), members in found.items()]


def agree_on_inventory(exchange: RankExchange, model: nn.Module) -> Inventory:
    """The inventory of ``model``. Raises on every rank if the models of two ranks differ.

    Raises:
        TypeError, ValueError: see :func:`make_inventory`.
        MetadataMismatchError: the models of two ranks differ.
    """
    taken: list[Inventory] = []

    def take() -> str:
        taken.append(make_inventory(model))
        described: list[tuple] = [
            (h.names, h.shape, str(h.dtype), h.layout, h.first) for h in taken[0].parameters
        ]
        described += [(b.names, b.shape, str(b.tensor.dtype), b.row) for b in taken[0].buffers]
        return hashlib.sha256(repr([described, list(taken[0].extra_state)]).encode()).hexdigest()

    exchange.require_equal(
        "inspect its model",
        take,
        "rank {rank} has another model than rank 0. Names, shapes, dtypes and wrapping of all "
        "parameters and buffers must be equal on every rank.",
    )
    return taken[0]


def gather_members(
    part: Part, value: torch.Tensor, to: torch.device | None
) -> list[torch.Tensor] | None:
    """Gathers the full tensors of ``part.members`` on the device ``to``. Call it on every rank.

    ``value``: this rank's shard, which is the holder or has its shape. Ranks that pass ``None`` for
    ``to`` take part in the collective and get ``None``. Only this part is gathered at a time.
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
        return [members[shard.member] for shard in part.members]
    # Padding is at the end in both layouts, so each member is a range of the flattened tensor.
    flat = full.cpu().view(-1)
    tensors = []
    for shard in part.members:
        offset = part.layout.members[shard.member].offset
        piece = flat[offset : offset + shard.numel].view(shard.shape)
        tensors.append(piece if shard.numel == flat.numel() else piece.clone())
    return tensors


def _gather(part: Part, value: torch.Tensor) -> torch.Tensor:
    layout, world = part.layout, part.world
    assert layout is not None and world is not None  # it is sharded
    count = torch.Size(layout.shard_shape).numel()
    shard = value.to(world.device)
    if count == 0:
        return shard.new_zeros(layout.padded_shape)
    # One of several stacked blocks. Its index is an input: a constant would compile one program for
    # each block.
    if shard.numel() != count:
        block = torch.tensor([part.members[0].first // count]).to(world.device)
        shard = torch.index_select(shard.view(-1, count), 0, block)
    full = world.all_gather(shard.view(layout.comm_shape), part.members[0].name)
    del shard
    torch_xla.sync(wait=True)
    return full


def _copied(value: torch.Tensor, to: torch.device) -> torch.Tensor:
    return value.clone() if to != CPU or value.device == CPU else value.cpu()
