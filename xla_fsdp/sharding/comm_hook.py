"""A user's function in place of the reductions of a unit."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .grad_bucket import FullGradients, GradBucket, ReplicatedShards
from .sharded_tensor import ShardedTensor
from .unit import Unit

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
        if unit.wire.hook is not None:
            raise RuntimeError(
                f"{unit.title!r} has a communication hook already: register one once, on the "
                "outermost wrapper for all"
            )
    for unit in units:
        unit.wire.hook = CommHook(unit, state, hook, over)


@dataclass(eq=False)
class CommHook:
    """What a wire calls, see ``Wire.hook``."""

    unit: Unit
    state: object
    hook: Hook
    over: str

    def __call__(
        self, tensors: Sequence[ShardedTensor], fulls: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        unit, memory = self.unit, self.unit.memory
        kind = FullGradients if self.over == "all" else ReplicatedShards
        with contextlib.nullcontext() if memory is None else memory.watching():
            bucket = kind(unit, self._names(tensors), unit.wire, tensors, fulls)
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
