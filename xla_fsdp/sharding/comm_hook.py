"""Communication hooks: a user's function that replaces the reductions of an FSDP unit.

Shape letters: ``N`` ranks share a parameter, ``d`` rows a rank in the shape that is sent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch.distributed.algorithms import _comm_hooks, ddp_comm_hooks

from .comm_plan import Collective, Divisors, plan_reduction
from .comms import Communicator, pack_gradients, split_shards
from .mixed_precision import to_float32
from .sharded_tensor import ShardedTensor
from .unit import Unit


class GradBucket:
    """Gradients of some parameters, and ways to average them over the ranks.

    A hook returns what :meth:`reduce` or :meth:`shard_of` gives: the mean gradient of this rank's
    shards, ``(d, ...)``. Everything is traced, so all ranks must do the same operations.

    Attributes:
        names: dotted names of the parameters, in the order of :meth:`gradients`; for scanned
            blocks, which call the hook once for all, without the block's number.
    """

    def __init__(
        self,
        names: Sequence[str],
        comms: Communicator,
        planned: Collective,
        tensors: Sequence[ShardedTensor],
        fulls: Sequence[torch.Tensor],
    ) -> None:
        self.names = tuple(names)
        self._comms = comms
        self._planned = planned
        self._tensors = tensors
        self._fulls = fulls

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this GradBucket has no {name!r}. A hook of torch's DDP needs another bucket: use one "
            "of xla_fsdp.comm_hooks, or return bucket.reduce(bucket.buffer())"
        )

    @property
    def ranks(self) -> int:
        """The number of ranks that :meth:`reduce` averages over."""
        return self._comms.world.size * self._comms.world.replicas

    @property
    def divisor(self) -> float:
        """The divisor of the sum over all ranks: :attr:`ranks`, unless divide factors were set."""
        return self._comms.divisors.product

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """``(d, ...)``, the shape that a hook must return."""
        return self._planned.shape

    def buffer(self) -> torch.Tensor:
        """All gradients as one tensor ``(N * d, ...)``, not divided, as :meth:`reduce` takes it."""
        return pack_gradients(self._fulls, self._planned)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, not divided, in the order of ``names``."""
        return [
            piece
            for tensor, full in zip(self._tensors, self._fulls, strict=True)
            for piece in tensor.layout.split(full)
        ]

    def reduce(self, buffer: torch.Tensor | None = None, divided_by: float = 1.0) -> torch.Tensor:
        """This rank's shard of the mean of ``buffer`` over all ranks, summed in the buffer's dtype.

        Args:
            buffer: a tensor of the shape of :meth:`buffer`, which is the default.
            divided_by: the divisor that the hook has already applied to ``buffer``.
        """
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
        """The sum of ``tensor`` over the ranks that :meth:`reduce` averages over; same shape."""
        world, name = self._comms.world, self._planned.name
        return world.sum_over_replicas(world.all_reduce_sum(tensor, name), name)

    def shard_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's shard of full mean ``gradients``, shaped like :meth:`gradients`."""
        world, given, mine = self._comms.world, list(gradients), []
        for tensor in self._tensors:
            count = len(tensor.layout.members)
            by_rank = tensor.layout.join(given[:count]).view(world.size, -1)
            # The rank is data: a constant would give each rank another program.
            mine.append(torch.index_select(by_rank, 0, world.rank_on_device))
            given = given[count:]
        return torch.cat(mine, dim=1).view(self.shard_shape)


class ReplicatedShards(GradBucket):
    """Gradient shards, summed over the sharding group, to be averaged over the replicas.

    ``gradients()`` are pieces of ``buffer()``, ``(d, ...)``: one shard a sharded tensor.
    """

    @cached_property
    def _shard(self) -> torch.Tensor:
        one, full = self._planned, super().buffer()
        if one.divide_before != 1:
            full = full / one.divide_before
        return to_float32(self._comms.world.reduce_scatter(full, one.name, route=one.route))

    @property
    def ranks(self) -> int:
        return self._comms.world.replicas

    @property
    def divisor(self) -> float:
        return self._comms.divisors.after

    def buffer(self) -> torch.Tensor:
        return self._shard

    def gradients(self) -> list[torch.Tensor]:
        return split_shards(self._shard, self._tensors)

    def reduce(self, buffer: torch.Tensor | None = None, divided_by: float = 1.0) -> torch.Tensor:
        shard = self._shard if buffer is None else buffer
        return to_float32(self.all_reduce(shard)) / (self.divisor / divided_by)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._comms.world.sum_over_replicas(tensor, self._planned.name)

    def shard_of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([piece.reshape(-1) for piece in gradients]).view(self.shard_shape)


Hook = Callable[[Any, GradBucket], torch.Tensor]

OVER = ("all", "replicas")


def register(units: Sequence[Unit], state: object, hook: Hook, over: str) -> None:
    """Makes ``hook`` compute the reductions of ``units``: see the wrapper's method."""
    _require_hook(hook)
    if over not in OVER:
        raise ValueError(f"over must be one of {', '.join(map(repr, OVER))}, got {over!r}")
    for unit in units:
        if over == "replicas" and unit.world.replicas == 1:
            raise ValueError(
                f"over='replicas' needs replicas, but {unit.title} has none. Wrap with "
                "replication_groups or a device_mesh of two dimensions, or register the hook with "
                "over='all'"
            )
        if unit.comms.hook is not None:
            raise RuntimeError(
                f"{unit.title} already has a communication hook, and a unit can have one. "
                "Register the hook once, on the outermost wrapper"
            )
    for unit in units:
        unit.comms.hook = functools.partial(_reduce_by_hook, unit, state, hook, over)


def _reduce_by_hook(
    unit: Unit,
    state: object,
    hook: Hook,
    over: str,
    one: Collective,
    tensors: Sequence[ShardedTensor],
    fulls: Sequence[torch.Tensor],
) -> torch.Tensor:
    names: list[str] = []
    for tensor in tensors:
        names += unit.names_of(tensor, len(tensor.layout.members) if over == "all" else 1)
    kind = GradBucket if over == "all" else ReplicatedShards
    bucket = kind(names, unit.comms, one, tensors, fulls)
    reduced: object = hook(state, bucket)
    said = f"the communication hook {_called(hook)} got gradients of {bucket.names}"
    remedy = "return bucket.reduce(buffer) or bucket.shard_of(gradients)"
    if not isinstance(reduced, torch.Tensor):
        raise TypeError(
            f"{said} and returned a {type(reduced).__name__}. It must return a tensor, the mean "
            f"gradient of this rank's shard: {remedy}"
        )
    if tuple(reduced.shape) != bucket.shard_shape:
        raise ValueError(
            f"{said} and returned a tensor of shape {tuple(reduced.shape)}. It must return this "
            f"rank's shard, of shape {bucket.shard_shape}: {remedy}"
        )
    own = bucket.buffer().dtype
    if reduced.dtype != own and not (reduced.dtype.is_floating_point and own.is_floating_point):
        raise ValueError(
            f"{said}, which are {own}, and returned a tensor of {reduced.dtype}. It must "
            f"return {own}, or another floating-point dtype for floating-point gradients"
        )
    return reduced


_OF_TORCH = (
    _comm_hooks.default_hooks, ddp_comm_hooks.default_hooks, ddp_comm_hooks.powerSGD_hook,
    ddp_comm_hooks.quantization_hooks,
)  # fmt: skip


def _require_hook(hook: object) -> None:
    if not callable(hook):
        raise TypeError(f"hook must be a function hook(state, bucket), got {hook!r}")
    if any(hook is one for module in _OF_TORCH for one in vars(module).values()):
        raise TypeError(
            f"{_called(hook)} is a hook of torch, which calls torch.distributed's process groups. "
            "Use the hook of that name in xla_fsdp.comm_hooks (bf16_compress_hook, "
            "fp16_compress_hook, allreduce_hook, reduce_scatter_hook), or write one"
        )
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"hook must be a function of two arguments, hook(state, bucket), but {_called(hook)} "
            f"is not ({error}). A hook of torch FSDP writes the result into its third argument; "
            "here, return it: bucket.reduce(bucket.buffer())"
        ) from None
    except ValueError:  # a builtin has no signature
        return


def _called(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)
