"""A user's function in place of the reductions of a unit, and what it is given.

Shape letters: ``N`` ranks share a parameter, ``d`` rows a rank in the shape that travels.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .block_memory import BlockMemory
from .comm_plan import Collective, Divisors, plan_reduction
from .comms import Communicator, packed, shares, widened
from .layout import Layout
from .sharded_tensor import ShardedTensor
from .unit import Unit


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
        comms: Communicator,
        planned: Collective,
        tensors: Sequence[ShardedTensor],
    ) -> None:
        self.names = tuple(names)
        self.block_names: Sequence[tuple[str, ...]] | None = None
        self.memory: BlockMemory | None = None
        self.owner = owner
        self._comms = comms
        self._planned = planned
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
        return self._comms.world.size * self._comms.world.replicas

    @property
    def divisor(self) -> float:
        """What the sum of all ranks is divided by: their number, unless divide factors were set."""
        return self._comms.divisors.product

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
        comms: Communicator,
        planned: Collective,
        tensors: Sequence[ShardedTensor],
        fulls: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(owner, names, comms, planned, tensors)
        self._fulls = fulls

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self._planned.shape

    def buffer(self) -> torch.Tensor:
        return packed(self._fulls, self._planned)

    def gradients(self) -> list[torch.Tensor]:
        return [
            piece
            for tensor, full in zip(self._tensors, self._fulls, strict=True)
            for piece in tensor.layout.split(full)
        ]

    def reduce(self, buffer: torch.Tensor | None = None, divided_by: float = 1.0) -> torch.Tensor:
        comms, one = self._comms, self._planned
        divisors = comms.divisors
        if divided_by != 1:
            divisors = Divisors(1.0, self.divisor / divided_by)
        full = self.buffer() if buffer is None else buffer
        rows, *rest = full.shape
        shape = (rows // one.ranks, *rest)
        one = plan_reduction(comms.world, one.tensors, one.name, shape, full.dtype, divisors)
        return comms.reduced(one, full, narrow=buffer is not None)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        world, name = self._comms.world, self._planned.name
        return world.sum_over_replicas(world.all_reduce_sum(tensor, name), name)

    def shard_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        world, given, mine = self._comms.world, list(gradients), []
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
        comms: Communicator,
        planned: Collective,
        tensors: Sequence[ShardedTensor],
        fulls: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(owner, names, comms, planned, tensors)
        full = packed(fulls, planned)
        if planned.divide_before != 1:
            full = full / planned.divide_before
        shard = comms.world.reduce_scatter(full, planned.name, route=planned.route)
        self._shard = widened(shard)

    @property
    def ranks(self) -> int:
        return self._comms.world.replicas

    @property
    def divisor(self) -> float:
        return self._comms.divisors.after

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return tuple(self._shard.shape)

    def buffer(self) -> torch.Tensor:
        return self._shard

    def gradients(self) -> list[torch.Tensor]:
        pieces = shares(self._shard, self._tensors)
        return [
            piece.view(_shape_of_rows(tensor.layout))
            for tensor, piece in zip(self._tensors, pieces, strict=True)
        ]

    def reduce(self, buffer: torch.Tensor | None = None, divided_by: float = 1.0) -> torch.Tensor:
        shard = self._shard if buffer is None else buffer
        return widened(self.all_reduce(shard)) / (self.divisor / divided_by)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._comms.world.sum_over_replicas(tensor, self._planned.name)

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


Hook = Callable[[Any, GradBucket], torch.Tensor]

OVER = ("all", "replicas")


def register(units: Sequence[Unit], state: object, hook: Hook, over: str) -> None:
    """Has ``hook`` make the reductions of ``units``; see ``register_comm_hook`` of the wrapper.

    Raises:
        TypeError: ``hook`` is no function of a state and a bucket, or one of torch's.
        ValueError: ``over`` is not among those allowed, or a unit has no replicas.
        RuntimeError: a unit has a hook already.
    """
    _require_hook(hook)
    if over not in OVER:
        raise ValueError(f"over must be one of {', '.join(map(repr, OVER))}, got {over!r}")
    for unit in units:
        if over == "replicas" and unit.world.replicas == 1:
            raise ValueError(
                f"over='replicas', but {unit.title!r} has none: give replication_groups, or a "
                "device_mesh of two dimensions, or register the hook with over='all'"
            )
        if unit.comms.hook is not None:
            raise RuntimeError(
                f"{unit.title!r} has a communication hook already: register one once, on the "
                "outermost wrapper for all"
            )
    for unit in units:
        unit.comms.hook = CommHook(unit, state, hook, over)


@dataclass(eq=False)
class CommHook:
    """A user's hook, as ``Communicator.hook``."""

    unit: Unit
    state: object
    hook: Hook
    over: str

    def __call__(
        self,
        one: Collective,
        tensors: Sequence[ShardedTensor],
        fulls: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        unit, memory = self.unit, self.unit.memory
        kind = FullGradients if self.over == "all" else ReplicatedShards
        with contextlib.nullcontext() if memory is None else memory.watching():
            bucket = kind(unit, self._names(tensors), unit.comms, one, tensors, fulls)
            if memory is not None:
                bucket.block_names = [self._names(tensors, one) for one in range(memory.depth)]
                bucket.memory = memory
            return self._checked(self.hook(self.state, bucket), bucket)

    def _names(self, tensors: Sequence[ShardedTensor], block: int | None = None) -> tuple[str, ...]:
        names: list[str] = []
        for tensor in tensors:
            members = len(tensor.layout.members) if self.over == "all" else 1
            names += self.unit.names_of(tensor, members, block)
        return tuple(names)

    def _checked(self, reduced: object, bucket: GradBucket) -> torch.Tensor:
        said = f"the communication hook {_called(self.hook)} was given gradients of {bucket.names}"
        if not isinstance(reduced, torch.Tensor):
            raise TypeError(
                f"{said}, and returned a {type(reduced).__name__}: it must return the mean "
                "gradient of this rank's shard, as bucket.reduce(buffer) and "
                "bucket.shard_of(gradients) give it"
            )
        if tuple(reduced.shape) != bucket.shard_shape:
            raise ValueError(
                f"{said}, and returned a tensor of shape {tuple(reduced.shape)}: it must be this "
                f"rank's shard, of shape {bucket.shard_shape}, as bucket.reduce(buffer) and "
                "bucket.shard_of(gradients) give it"
            )
        own = bucket.buffer().dtype
        if reduced.dtype != own and not (reduced.dtype.is_floating_point and own.is_floating_point):
            raise ValueError(f"{said}, which are {own}, and returned {reduced.dtype}")
        return reduced


def _require_hook(hook: object) -> None:
    if not callable(hook):
        raise TypeError(f"hook must be a function hook(state, bucket), got {hook!r}")
    if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
        raise TypeError(
            f"{_called(hook)} is torch's, which calls torch.distributed's process groups: take the "
            "one of that name in xla_fsdp.comm_hooks (bf16_compress_hook, fp16_compress_hook, "
            "allreduce_hook, reduce_scatter_hook), or write one"
        )
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"hook must be a function of two arguments, hook(state, bucket), and {_called(hook)} "
            f"is not ({error}). A hook of torch FSDP, which writes into its third argument, "
            "returns that here: bucket.reduce(bucket.buffer())"
        ) from None
    except ValueError:  # a builtin, whose signature is not known
        return


def _called(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)
