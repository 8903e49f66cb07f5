"""What a unit has its wire do, as one operator for each gather and one for each reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..collectives.order import Order
from .once import Once, Tensors
from .secondary import Secondary
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
        secondary: Secondary | None = None,
    ) -> Tensors:
        """As :meth:`Wire.gather`."""
        if not tensors:
            return []
        if not self._wire.world.as_on_tpu:
            return self._wire.gather(tensors, order, events, backward, secondary)
        before = [] if order.last is None else [order.last]
        kept = [] if secondary is None else list(secondary.pieces.items())
        fills = secondary is not None and not kept and not backward
        shards = [] if kept else [tensor.source for tensor in tensors]

        def gathered(given: Tensors) -> Tensors:
            inside, rest = Order(), iter(given)
            # What stands for a shard in the trace is no Parameter.
            own = list(tensors)
            if shards:
                own = [replace(t, shard=next(rest), copy=None) for t in own]  # type: ignore[arg-type]
            pieces = {number: next(rest) for number, _ in kept}
            then = [next(rest) for _ in events]
            inside.last = next(rest, None)
            held = None if secondary is None else replace(secondary, pieces=pieces)
            full = self._wire.gather(own, inside, then, backward, held)
            made = list(held.pieces.values()) if held is not None and fills else []
            return [*full, *made, *([] if inside.last is None else [inside.last])]

        key = backward, len(events), bool(kept), fills
        given = [*shards, *(piece for _, piece in kept), *events, *before]
        found = self._once("gather", gathered, given, key)
        number = sum(len(tensor.layout.members) for tensor in tensors)
        full, found = found[:number], found[number:]
        if secondary is not None and fills:
            numbers = [part[0] for part in self._wire.gathered_parts(tensors)]
            secondary.pieces.update(zip(numbers, found, strict=False))
            found = found[len(numbers) :]
        order.last = found[0] if found else None
        return full

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

    def backward_over(self) -> None:
        """A backward of the unit ended, or will not end."""
