"""What a communication hook is given: gradients that are about to be reduced together.

Shape letters: ``N`` ranks share a parameter, ``d`` rows a rank in the shape that travels.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import torch

from .block_memory import BlockMemory
from .layout import Layout
from .sharded_tensor import ShardedTensor
from .wire import Wire, lanes, widened


class GradBucket(abc.ABC):
    """Gradients of some parameters, and the ways to average them.

    A hook returns what :meth:`reduce` or :meth:`shard_of` gives: the mean gradient of this rank's
    shards, ``(d, ...)``. Everything is traced, so all ranks must do the same.

    Attributes:
        names: dotted names of the parameters, in order of :meth:`gradients`.
        owner: the unit that the parameters are of; another object for each.
        block_names: of scanned blocks, for all of which the hook is called once, the names in each
            block; ``None`` elsewhere. ``names`` leave the number of the block out.
    """

    def __init__(
        self,
        owner: object,
        names: Sequence[str],
        wire: Wire,
        tensors: Sequence[ShardedTensor],
    ) -> None:
        self.names = tuple(names)
        self.block_names: Sequence[tuple[str, ...]] | None = None
        self.memory: BlockMemory | None = None
        self.owner = owner
        self._wire = wire
        self._tensors = tensors

    def recall(self, kept: torch.Tensor) -> torch.Tensor:
        """``kept``, which the hook keeps from one backward to the next.

        Of scanned blocks that is a tensor with a row for each, ``(len(block_names), ...)``, and
        here comes the row of the block whose gradients these are.
        """
        return kept if self.memory is None else self.memory.recall(kept)

    def remember(self, kept: torch.Tensor, value: torch.Tensor) -> None:
        """Changes in place what :meth:`recall` gives."""
        if self.memory is None:
            kept.copy_(value)
        else:
            self.memory.remember(kept, value)

    @property
    def ranks(self) -> int:
        """How many ranks the gradients are averaged over by :meth:`reduce`."""
        return self._wire.world.size * self._wire.world.replicas

    @property
    def divisor(self) -> float:
        """What the sum of all ranks is divided by: their number, unless divide factors were set."""
        return self._wire.predivide * self._wire.postdivide

    @property
    @abc.abstractmethod
    def shard_shape(self) -> tuple[int, ...]:
        """``(d, ...)``, what a hook must return."""

    @abc.abstractmethod
    def buffer(self) -> torch.Tensor:
        """All gradients as one tensor, undivided, laid out as :meth:`reduce` takes it."""

    @abc.abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """The gradients one by one, in order of ``names``, undivided."""

    @abc.abstractmethod
    def reduce(self, buffer: torch.Tensor | None = None, divided_by: float = 1.0) -> torch.Tensor:
        """The mean over all ranks of ``buffer``, this rank's shard of it.

        Args:
            buffer: of the shape of :meth:`buffer`, which is the default. Travels, and is summed up,
                in its dtype.
            divided_by: what the hook has divided ``buffer`` by already.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of ``tensor`` over the ranks that :meth:`reduce` averages over; same shape."""

    @abc.abstractmethod
    def shard_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's shard of mean gradients that are here already, shaped like
        :meth:`gradients`."""


class FullGradients(GradBucket):
    """A rank's own gradients: ``buffer()`` is ``(N * d, ...)``, ``gradients()`` have the shapes of
    the parameters. Nothing has been reduced."""

    def __init__(
        self,
        owner: object,
        names: Sequence[str],
        wire: Wire,
        tensors: Sequence[ShardedTensor],
        fulls: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(owner, names, wire, tensors)
        self._fulls = fulls

    @property
    def shard_shape(self) -> tuple[int, ...]:
        size = self._wire.world.size
        if len(self._fulls) > 1:
            return lanes(sum(full.numel() for full in self._fulls) // size)
        rows, *rest = self._fulls[0].shape
        return (rows // size, *rest)

    def buffer(self) -> torch.Tensor:
        return self._wire.packed(self._fulls)

    def gradients(self) -> list[torch.Tensor]:
        return [
            piece
            for tensor, full in zip(self._tensors, self._fulls, strict=True)
            for piece in tensor.layout.split(full)
        ]

    def reduce(self, buffer: torch.Tensor | None = None, divided_by: float = 1.0) -> torch.Tensor:
        wire, name = self._wire, self._wire.name(self._tensors)
        before, after = wire.predivide, wire.postdivide
        if divided_by != 1:
            before, after = 1.0, self.divisor / divided_by
        full = self.buffer() if buffer is None else buffer
        return wire.averaged(full, name, before, after, narrow=buffer is not None)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        world, name = self._wire.world, self._wire.name(self._tensors)
        return world.sum_over_replicas(world.all_reduce_sum(tensor, name), name)

    def shard_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        world, given, mine = self._wire.world, list(gradients), []
        for tensor in self._tensors:
            count = len(tensor.layout.members)
            by_rank = tensor.layout.join(given[:count]).view(world.size, -1)
            # The rank is data: a number in the program would make a program for each.
            mine.append(torch.index_select(by_rank, 0, world.rank_on_device))
            given = given[count:]
        return torch.cat(mine, dim=1).view(self.shard_shape)


class ReplicatedShards(GradBucket):
    """Gradients summed up over the sharding group already, to be averaged over replicas.

    ``buffer()`` is this rank's ``(d, ...)``, and ``gradients()`` are its pieces: rows of the
    parameter where its shards are made of them (see :mod:`xla_fsdp.sharding.layout`), else a vector
    of elements. One for each sharded tensor: a flattened wrapper has one vector.
    """

    def __init__(
        self,
        owner: object,
        names: Sequence[str],
        wire: Wire,
        tensors: Sequence[ShardedTensor],
        fulls: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(owner, names, wire, tensors)
        full, name = wire.packed(fulls), wire.name(tensors)
        if wire.predivide != 1:
            full = full / wire.predivide
        large = wire.beside_compute(full)
        self._shard = widened(wire.world.reduce_scatter(full, name, beside_compute=large))

    @property
    def ranks(self) -> int:
        return self._wire.world.replicas

    @property
    def divisor(self) -> float:
        return self._wire.postdivide

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return tuple(self._shard.shape)

    def buffer(self) -> torch.Tensor:
        return self._shard

    def gradients(self) -> list[torch.Tensor]:
        pieces = self._wire.shares(self._shard, self._tensors)
        return [
            piece.view(_shape_of_rows(tensor.layout))
            for tensor, piece in zip(self._tensors, pieces, strict=True)
        ]

    def reduce(self, buffer: torch.Tensor | None = None, divided_by: float = 1.0) -> torch.Tensor:
        shard = self._shard if buffer is None else buffer
        return widened(self.all_reduce(shard)) / (self.divisor / divided_by)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._wire.world.sum_over_replicas(tensor, self._wire.name(self._tensors))

    def shard_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([piece.reshape(-1) for piece in gradients]).view(self.shard_shape)


def _shape_of_rows(layout: Layout) -> tuple[int, ...]:
    """The shape of a shard that is made of whole rows of a parameter, else that of a vector."""
    if layout.kind == "dim0":
        return layout.shard_shape
    shape = layout.members[0].shape
    if len(layout.members) == 1 and len(shape) == 2 and layout.wire_shape[1] == shape[1]:
        # A vector travels in rows of 128 as well, and so does a matrix whose last rows are padded.
        if layout.numel == math.prod(layout.padded_shape):
            return layout.wire_shape
    return (math.prod(layout.shard_shape),)
