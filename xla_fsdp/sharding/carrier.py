"""What a unit has its wire do, as one operator for each gather and one for each reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..collectives.order import Order
from .once import Once, Tensors
from .sharded_tensor import ShardedTensor
from .wire import Wire


class Carrier:
    """Gathers and reduces the sharded tensors of one unit, always the same ones."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._once = Once(wire.world)

    def gather(
        self,
        tensors: Sequence[ShardedTensor],
        order: Order,
        events: Sequence[torch.Tensor],
        backward: bool,
    ) -> Tensors:
        """As :meth:`Wire.gather`."""
        if not tensors:
            return []
        if not self._wire.world.as_on_tpu:
            return self._wire.gather(tensors, order, events, backward)
        before = [] if order.last is None else [order.last]

        def gathered(given: Tensors) -> Tensors:
            inside = Order()
            if before:
                inside.last = given.pop()
            # What stands for a shard in the trace is no Parameter.
            pairs = zip(tensors, given, strict=False)
            own = [replace(t, shard=shard) for t, shard in pairs]  # type: ignore[arg-type]
            full = self._wire.gather(own, inside, given[len(own) :], backward)
            return full if inside.last is None else [*full, inside.last]

        shards = [tensor.shard for tensor in tensors]
        key = backward, len(events)
        found = self._once("gather", gathered, [*shards, *events, *before], key)
        number = sum(len(tensor.layout.members) for tensor in tensors)
        order.last = found[number] if len(found) > number else None
        return found[:number]

    def reduce(
        self,
        tensors: Sequence[ShardedTensor],
        grads: Mapping[int, Sequence[torch.Tensor | None]],
        held: Mapping[int, torch.Tensor],
    ) -> tuple[dict[int, torch.Tensor], Tensors]:
        """As :meth:`Wire.reduce` of what :meth:`Wire.joined` makes of ``grads`` and ``held``."""
        # What a user's hook does may differ from step to step.
        if not self._wire.world.as_on_tpu or self._wire.hook is not None:
            return self._wire.reduce(tensors, self._wire.joined(tensors, grads, held))
        there = {n: tuple(grad is not None for grad in one) for n, one in grads.items()}

        def reduced(given: Tensors) -> Tensors:
            rest = iter(given)
            own = {n: [next(rest) if yes else None for yes in one] for n, one in there.items()}
            fulls = self._wire.joined(tensors, own, {n: next(rest) for n in held})
            shards, arrived = self._wire.reduce(tensors, fulls)
            return [*(shards[n] for n in there), *arrived]

        given = [grad for one in grads.values() for grad in one if grad is not None]
        # A module may be cast after it is wrapped, and the divisors may be set.
        dtypes = tuple(tensor.shard.dtype for tensor in tensors)
        key = tuple(there.items()), tuple(held), dtypes, self._wire.predivide, self._wire.postdivide
        found = self._once("reduce", reduced, [*given, *held.values()], key)
        return dict(zip(there, found, strict=False)), found[len(there) :]
