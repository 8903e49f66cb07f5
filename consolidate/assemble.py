"""Rebuild full tensors from shards.

Each result is allocated at its final size and the shards are copied into place, so that padding is
never copied and nothing but the result is held in memory (shards of a mapped file stay on disk).
"""

from collections import OrderedDict
from typing import Any

import torch

from .errors import ShardMismatchError
from .layout import FLAT, Buffer, Member
from .ranks import Rank


def assemble(ranks: list[Rank]) -> "OrderedDict[str, Any]":
    """Full state_dict of a checked world (`complete_world`, then `check_consistent`).

    Keys come in the order of rank 0's state_dict, the members of a flat parameter in its place.
    Names of one tied weight share one tensor. No result shares memory with a shard.

    Raises:
        ShardMismatchError: a tied weight was stored twice with different values.
    """
    first = ranks[0]
    layout = first.layout
    # By key, one tensor a member: kept because a tied key may come before or after its owner.
    built: dict[str, list[torch.Tensor]] = {}
    full: OrderedDict[str, Any] = OrderedDict()
    for key, value in first.state_dict.items():
        if key in layout.buffers:
            buffer = layout.buffers[key]
            full[buffer.name] = _restore_buffer(value, buffer)
            continue
        owner = layout.aliases.get(key, key)
        members = layout.parameters[owner].members
        if owner not in built:
            built[owner] = [_assemble_member(ranks, owner, member) for member in members]
        if key != owner:
            _check_alias(ranks, key, owner)
        for member, tensor in zip(members, built[owner], strict=True):
            for name in member.names:
                # A tied name that rank 0 lists itself is left for its own place in the order.
                if name == key or (key == owner and name not in layout.aliases):
                    full[name] = tensor
    return full


@torch.no_grad()
def _assemble_member(ranks: list[Rank], key: str, member: Member) -> torch.Tensor:
    """Copy the parts of one member out of the shards that hold them.

    Along dimension 0, rank r stores [r * chunk, (r + 1) * chunk) of the joined tensor and the
    member is [offset, offset + length) of it. Example: chunk 4, offset 3, length 6: element 3 of
    rank 0, all of rank 1, element 0 of rank 2.
    """
    shard = ranks[0].state_dict[key]
    is_flat = ranks[0].layout.parameters[key].layout == FLAT
    shape = (member.numel,) if is_flat else member.shape
    out = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    chunk, length = shard.shape[0], shape[0]
    for index, rank in enumerate(ranks):
        begin = max(index * chunk, member.offset)
        end = min((index + 1) * chunk, member.offset + length)
        if begin < end:
            source = rank.state_dict[key].detach()[begin - index * chunk : end - index * chunk]
            out[begin - member.offset : end - member.offset].copy_(source)
    return out.view(member.shape)


def _restore_buffer(value: Any, buffer: Buffer) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # A copy even when the dtype is right: the result must not keep the rank's file mapped.
    return value.detach().to(buffer.dtype or value.dtype, copy=True)


def _check_alias(ranks: list[Rank], alias: str, key: str) -> None:
    """Tied weights stored under both names must agree, else one of them would be lost unnoticed."""
    for rank in ranks:
        one, other = rank.state_dict[alias], rank.state_dict[key]
        if one is not other and not _same_bytes(one, other):
            raise ShardMismatchError(f"{rank.label}: {alias!r} is tied to {key!r} but differs")


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, since NaN is not equal to itself."""
    flat = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)
