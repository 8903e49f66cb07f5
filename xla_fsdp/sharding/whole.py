"""The full parameters in one sharded tensor, gathered to be held for a while, and cut again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..collectives.host_data import as_data
from ..collectives.order import Order
from ..collectives.world import World
from .freeing import stamps
from .sharded_tensor import ShardedTensor
from .unit import Unit
from .wire import Wire


@dataclass(frozen=True)
class How:
    """What is asked for, the same on every rank."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@dataclass(frozen=True, eq=False)
class Whole:
    """The full parameters in one sharded tensor, and what they were when they came."""

    how: How
    world: World
    parameters: list[nn.Parameter]
    values: list[object]
    grads: list[object]

    @classmethod
    def of(cls, how: How, world: World, parameters: list[nn.Parameter]) -> Whole:
        return cls(how, world, parameters, *_seen(parameters))

    def changed(self) -> tuple[bool, bool]:
        """Whether values, and whether gradients, may be others by now."""
        values, grads = _seen(self.parameters)
        return values != self.values, grads != self.grads


def gathered(
    unit: Unit, tensors: Sequence[ShardedTensor], shards: Sequence[torch.Tensor]
) -> dict[ShardedTensor, list[torch.Tensor]]:
    """The members of every one of ``tensors`` in full, in the dtype of their ``shards``."""
    exact = replace(unit.options, compute_dtype=None, mixed_precision=None)
    wire = Wire(exact, unit.world)
    wire.label = unit.wire.label
    # What stands for a shard on the wire need be no Parameter.
    sent = [
        replace(tensor, shard=shard, copy=None)  # type: ignore[arg-type]
        for tensor, shard in zip(tensors, shards, strict=True)
    ]
    full = iter(wire.gather(sent, Order(), (), backward=False))
    return {tensor: [next(full) for _ in tensor.layout.members] for tensor in tensors}


def on_device(shard: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``shard``, or a copy of one that is on the host."""
    return shard if shard.device.type == "xla" else as_data(shard, device)


def cut(tensor: ShardedTensor, world: World, full: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's shard of the ``full`` members of ``tensor``, where the shard is."""
    layout, where = tensor.layout, tensor.shard.device
    if not layout.numel or full[0].device.type == "cpu":
        return layout.cut(full, world.rank).to(where)
    by_rank = layout.join(full).view(world.size, -1)
    own = torch.index_select(by_rank, 0, world.rank_on_device).view(layout.shard_shape)
    return own if where.type == "xla" else own.cpu()


def _seen(parameters: Sequence[nn.Parameter]) -> tuple[list[object], list[object]]:
    """Equal if neither the values nor the gradients of ``parameters`` were changed in between."""
    return [_mark(one) for one in parameters], [_mark(one.grad) for one in parameters]


def _mark(tensor: torch.Tensor | None) -> object:
    if tensor is None:
        return None
    # Changes of a tensor on the CPU cannot all be seen: never the same.
    return stamps([tensor])[0] if tensor.device.type == "xla" else object()
