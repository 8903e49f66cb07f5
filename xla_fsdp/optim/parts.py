"""The parameters of the unsharded model to which the elements of an optimizer's tensor belong.

Shape letters: ``d`` blocks of a stack (else 1), ``m`` parameters in the tensor (``d`` times its
members), ``s`` one shard, ``p`` all shards together, padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..collectives.world import World
from ..sharding.layout import count_up
from ..sharding.sharded_parameter import local
from ..sharding.sharded_tensor import sharded_tensor_of


class Parts:
    """The full parameters whose elements ``parameter``, a shard or a full parameter, contains.

    ``shapes``: of the unsharded parameters; for a stack, those of one block. ``offsets``: where
    they begin in a flat vector. A stack has one parameter in each block.
    """

    def __init__(self, parameter: torch.Tensor):
        sharded = sharded_tensor_of(parameter)
        self._spec = None if sharded is None else sharded.shard_spec()
        self.shape = local(parameter).shape
        self.world: World | None = None
        self.depth = 1
        self.name = "a parameter that is not sharded"
        self.shapes: tuple[tuple[int, ...], ...] = (tuple(self.shape),)
        self.offsets = [0]
        if sharded is not None and self._spec is not None:
            self.world, self.name, self.depth = sharded.world, repr(sharded.key), self._spec.blocks
            self.shapes = tuple(member.shape for member in sharded.layout.members)
            self.offsets = [member.offset for member in sharded.layout.members]

    @property
    def count(self) -> int:
        return self.depth * len(self.shapes)

    @property
    def numels(self) -> list[int]:
        """Of each parameter, on all ranks together; ``m`` numbers."""
        return [math.prod(shape) for shape in self.shapes] * self.depth

    def sums(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over each parameter, without padding: ``s`` to ``(m,)``."""
        if len(self.shapes) == 1:
            value = self.without_padding(value)
            return value.reshape(self.depth, value.numel() // self.depth).sum(1)
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        return torch.stack([torch.where(own, value, zero).sum() for own in self._masks(value)])

    def without_padding(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, ``s``, with 0 in the padding, which users may have changed."""
        if self._spec is None or not self._spec.padded:
            return value
        return torch.where(self._spec.inside(value), value, torch.zeros_like(value))

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
        full = value if self._spec is None else self._spec.gather(value, label)
        if len(self.shapes) == 1:
            return [full.reshape(self.depth, *self.shapes[0])]
        pieces = full.split([math.prod(shape) for shape in self.shapes])
        return [piece.view(1, *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def cut(self, fulls: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._spec is None:
            return fulls[0][0]
        one = len(fulls) == 1
        return self._spec.cut(fulls[0] if one else torch.cat([full.flatten() for full in fulls]))

    def positions(self, like: torch.Tensor) -> torch.Tensor:
        """Positions of this rank's elements (of one block) in the flattened ``p``, as a vector."""
        if self._spec is None:
            return count_up(self.shape.numel(), self.shape.numel(), like.device)
        return self._spec.positions(like)

    def _masks(self, like: torch.Tensor) -> list[torch.Tensor]:
        at = self.positions(like)
        places = zip(self.offsets, self.shapes, strict=True)
        return [(at >= first) & (at < first + math.prod(shape)) for first, shape in places]


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
