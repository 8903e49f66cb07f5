"""The parameters of the unsharded model to which the elements of an optimizer's tensor belong.

Shape letters: ``d`` blocks of a stack (else 1), ``m`` parameters in the tensor (``d`` times its
members), ``s`` one shard, ``p`` all shards together, padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..collectives.world import World
from ..sharding.layout import LANES, Layout
from ..sharding.sharded_parameter import local
from ..sharding.sharded_tensor import sharded_tensor_of

# Later positions need int64, which is slower than int32 on TPUs.
_INT32 = 1 << 31


class Parts:
    """The full parameters whose elements ``parameter``, a shard or a full parameter, contains.

    ``shapes``: of the unsharded parameters; for a stack, those of one block.
    """

    def __init__(self, parameter: torch.Tensor):
        sharded = sharded_tensor_of(parameter)
        parameter = local(parameter)
        self.shape = parameter.shape
        self.world: World | None = None
        self.depth = 1
        self.name = "a parameter that is not sharded"
        if sharded is None:
            self._layout = Layout.rows(torch.Size((1, *parameter.shape)), 1)
            self.shapes: tuple[tuple[int, ...], ...] = (tuple(parameter.shape),)
            return
        self.world, self._layout, self.name = sharded.world, sharded.layout, repr(sharded.key)
        self.shapes = tuple(member.shape for member in sharded.layout.members)
        if tuple(parameter.shape) != sharded.layout.shard_shape:
            self.depth = parameter.shape[0]

    @property
    def count(self) -> int:
        return self.depth * len(self.shapes)

    @property
    def offsets(self) -> list[int]:
        return [member.offset for member in self._layout.members]

    @property
    def numels(self) -> list[int]:
        """Of each parameter, on all ranks together; ``m`` numbers."""
        return [torch.Size(shape).numel() for shape in self.shapes] * self.depth

    def sums(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over each parameter, without padding: ``s`` to ``(m,)``."""
        if len(self.shapes) == 1:
            value = self.without_padding(value)
            return value.reshape(self.depth, value.numel() // self.depth).sum(1)
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        return torch.stack([torch.where(own, value, zero).sum() for own in self._masks(value)])

    def without_padding(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, ``s``, with 0 in the padding, which users may have changed."""
        if math.prod(self._layout.padded_shape) == self._layout.numel:
            return value
        inside = (self.positions(value) < self._layout.numel).view(self._layout.shard_shape)
        return torch.where(inside, value, torch.zeros_like(value))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats ``(m,)`` values for all elements of each parameter."""
        if len(self.shapes) == 1:
            return values[0] if self.depth == 1 else values.view(-1, *[1] * (len(self.shape) - 1))
        spread = values.new_zeros(self.shape)
        for own, value in zip(self._masks(values), values, strict=True):
            spread = torch.where(own, value, spread)
        return spread

    def gather(self, value: torch.Tensor, label: str) -> list[torch.Tensor]:
        """Every full parameter, ``(d, *shape)`` each, from a tensor of shape ``s`` on all ranks."""
        if self.world is None:
            return [value[None]]
        layout, size = self._layout, self.world.size
        rest = layout.shard_shape[1:]
        rows = value.reshape(-1, LANES) if layout.kind == "flat" else value.reshape(-1, *rest)
        full = self.world.all_gather(rows, label).reshape(size, self.depth, -1, *rest)
        full = full.transpose(0, 1).reshape(self.depth, *layout.padded_shape)
        if layout.kind == "dim0":
            return [full[:, : self.shapes[0][0]]]
        return [
            full[:, member.offset : member.offset + member.numel].reshape(self.depth, *member.shape)
            for member in layout.members
        ]

    def cut(self, fulls: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.world is None:
            return fulls[0][0]
        layout = self._layout
        if layout.kind == "dim0":
            full = fulls[0]
        else:
            full = torch.cat([each.reshape(self.depth, -1) for each in fulls], 1)
        missing = layout.padded_shape[0] - full.shape[1]
        if missing:
            padding = full.new_zeros(self.depth, missing, *full.shape[2:])
            full = torch.cat([full, padding], 1)
        shards = full.reshape(self.depth, self.world.size, *layout.shard_shape)
        return torch.index_select(shards, 1, self.world.rank_on_device).reshape(self.shape)

    def positions(self, like: torch.Tensor) -> torch.Tensor:
        """Positions of this rank's elements (of one block) in the flattened ``p``, as a vector."""
        length = torch.Size(self._layout.shard_shape).numel()
        size = 1 if self.world is None else self.world.size
        dtype = torch.int32 if size * length < _INT32 else torch.int64
        here = torch.arange(length, dtype=dtype, device=like.device)
        return here if self.world is None else here + self.world.rank_on_device.to(dtype) * length

    def _masks(self, like: torch.Tensor) -> list[torch.Tensor]:
        at = self.positions(like)
        members = self._layout.members
        return [(at >= one.offset) & (at < one.offset + one.numel) for one in members]


def reduced(
    parts: Sequence[Parts], values: Sequence[torch.Tensor], label: str
) -> list[torch.Tensor]:
    """``values`` summed over the ranks, in one all-reduce for each world and dtype."""
    numbers: dict[tuple[World | None, torch.dtype], list[int]] = {}
    for number, (part, value) in enumerate(zip(parts, values, strict=True)):
        numbers.setdefault((part.world, value.dtype), []).append(number)
    totals = list(values)
    for (world, _), own in numbers.items():
        if world is None or world.size == 1:
            continue
        flat = torch.cat([values[number].reshape(-1) for number in own])
        pieces = world.all_reduce_sum(flat, label).split([values[n].numel() for n in own])
        for number, piece in zip(own, pieces, strict=True):
            totals[number] = piece.view(values[number].shape)
    return totals


def norms(parts: Sequence[Parts], values: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
    """2-norms of the full parameters, ``(m,)``, float32 or wider, from local ``values``."""
    wide = [value if value.dtype is torch.float64 else value.float() for value in values]
    sums = [part.sums(value * value) for part, value in zip(parts, wide, strict=True)]
    return [total.sqrt() for total in reduced(parts, sums, label)]
