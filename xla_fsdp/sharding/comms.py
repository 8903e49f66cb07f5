"""Executes the communication plan of an FSDP unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ..collectives.order import Order, after
from ..collectives.world import World
from .comm_plan import Collective, Divisors, plan_gathers, plan_reductions, reduced_in
from .freeing import Stamp
from .layout import Layout
from .mixed_precision import to_float32
from .options import FSDPOptions
from .sharded_tensor import ShardedTensor
from .trace_cache import Tensors, TraceCache

Reduction = Callable[[Collective, Sequence[ShardedTensor], Tensors], torch.Tensor]


class Communicator:
    """Gathers and reduces the sharded tensors of one unit.

    ``label``: the unit's name with a dot after it, "" until it is known. ``hook``: the user's.
    """

    def __init__(self, options: FSDPOptions, world: World) -> None:
        self.options = options
        self.world = world
        self.label = ""
        self.hook: Reduction | None = None
        self.divisors = Divisors.of(world, False)

    @cached_property
    def _traced(self) -> TraceCache:
        return TraceCache(self.world)

    def gather(
        self,
        tensors: Sequence[ShardedTensor],
        order: Order,
        events: Sequence[torch.Tensor],
        backward: bool,
        secondary: SecondaryShards | None = None,
    ) -> Tensors:
        """Does :meth:`trace_gathers` as one operator, or, with ``secondary``, as several."""
        if not tensors:
            return []
        if not self.world.as_on_tpu or secondary is not None:
            return self.trace_gathers(tensors, order, events, backward, secondary)

        def gathered(given: Tensors) -> Tensors:
            inside, rest = Order(), iter(given)
            own = [replace(t, shard=next(rest), copy=None) for t in tensors]  # type: ignore[arg-type]
            then = [next(rest) for _ in events]
            inside.last = next(rest, None)
            full = self.trace_gathers(own, inside, then, backward)
            return [*full, *([] if inside.last is None else [inside.last])]

        before = [] if order.last is None else [order.last]
        given = [*(tensor.source for tensor in tensors), *events, *before]
        found = self._traced("gather", gathered, given, (backward, len(events)))
        number = sum(len(tensor.layout.members) for tensor in tensors)
        order.last = next(iter(found[number:]), None)
        return found[:number]

    def trace_gathers(
        self,
        tensors: Sequence[ShardedTensor],
        order: Order,
        events: Sequence[torch.Tensor],
        backward: bool,
        secondary: SecondaryShards | None = None,
    ) -> Tensors:
        """Every full parameter of ``tensors`` in compute dtype, gathered after ``events`` exist.

        ``secondary``: if it holds copies, gathers from them; otherwise a forward fills it.
        """
        stored = {} if secondary is None else dict(secondary.pieces)
        among = secondary.world if secondary is not None and stored else self.world
        plan = plan_gathers(
            [tensor.spec for tensor in tensors],
            self.options,
            self.world,
            label=self.label,
            backward=backward,
            stored_among=among if stored else None,
        )
        parts = [[tensors[number] for number in one.tensors] for one in plan]
        shards = []
        for one, part in zip(plan, parts, strict=True):
            if stored:
                shards.append(stored[one.tensors[0]])
            elif len(part) == 1:
                shards.append(part[0].source)
            else:
                sources = [tensor.source for tensor in part]
                shards.append(torch.cat([s if s.dim() == 1 else s.reshape(-1) for s in sources]))
        # On CPUs a chain of collectives already gives the order.
        in_turn = self.world.as_on_tpu
        if in_turn:
            shards = after(shards, events)
        full: dict[int, Tensors] = {}
        for one, part, shard in zip(plan, parts, shards, strict=True):
            # First wait: the compiler would do an earlier reshape or cast once for forward and
            # backward, and keep the result in between.
            if in_turn:
                shard = order.delay(shard).view(one.shape)
            else:
                shard = torch.view_copy(shard, one.shape)
            if not stored:
                shard = shard.to(one.dtype)
            gathered = among.all_gather(shard, one.name, one.route)
            if secondary is not None and not stored and not backward:
                gathered = secondary.keep(one.tensors[0], gathered)
            if in_turn:
                order.add_gather(gathered)
            pieces = _split(gathered, [tensor.layout for tensor in part])
            for number, tensor, piece in zip(one.tensors, part, pieces, strict=True):
                dtype = tensor.spec.compute_dtype(self.options.compute_dtype)
                full[number] = [value.to(dtype) for value in tensor.layout.split(piece)]
        for number, tensor in enumerate(tensors):
            if not tensor.layout.numel:
                shard = tensor.source.to(tensor.spec.compute_dtype(self.options.compute_dtype))
                full[number] = [shard.new_zeros(member.shape) for member in tensor.layout.members]
        return [value for number in range(len(tensors)) for value in full[number]]

    def last_gathered(self, tensors: Sequence[ShardedTensor]) -> int:
        """Number of the tensor that a forward gathers last; 0 if nothing is sent."""
        plan = plan_gathers([tensor.spec for tensor in tensors], self.options, self.world)
        return plan[-1].tensors[-1] if plan else 0

    def reduce(
        self,
        tensors: Sequence[ShardedTensor],
        grads: Mapping[int, Sequence[torch.Tensor | None]],
        accumulated: Mapping[int, torch.Tensor],
    ) -> tuple[dict[int, torch.Tensor], Tensors]:
        """Does :meth:`join_gradients` and :meth:`trace_reductions`, as one operator."""
        # A user's hook may differ at each step, so it is traced each time.
        if not self.world.as_on_tpu or self.hook is not None:
            return self.trace_reductions(tensors, self.join_gradients(tensors, grads, accumulated))
        there = {n: tuple(grad is not None for grad in one) for n, one in grads.items()}

        def reduced(given: Tensors) -> Tensors:
            rest = iter(given)
            own = {n: [next(rest) if yes else None for yes in one] for n, one in there.items()}
            fulls = self.join_gradients(tensors, own, {n: next(rest) for n in accumulated})
            shards, arrived = self.trace_reductions(tensors, fulls)
            return [*(shards[n] for n in there), *arrived]

        given = [grad for one in grads.values() for grad in one if grad is not None]
        # These can change after wrapping.
        dtypes = tuple(tensor.shard.dtype for tensor in tensors)
        key = tuple(there.items()), tuple(accumulated), dtypes, self.divisors
        found = self._traced("reduce", reduced, [*given, *accumulated.values()], key)
        return dict(zip(there, found, strict=False)), found[len(there) :]

    def join_gradients(
        self,
        tensors: Sequence[ShardedTensor],
        grads: Mapping[int, Sequence[torch.Tensor | None]],
        accumulated: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Full gradients plus ``accumulated``, as one tensor each for the reduction, by number."""
        fulls = {}
        for number, members in grads.items():
            full = tensors[number].layout.join(members)
            full = full.to(reduced_in(full.dtype, self.options))
            fulls[number] = accumulated[number] + full if number in accumulated else full
        return fulls

    def trace_reductions(
        self, tensors: Sequence[ShardedTensor], fulls: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], Tensors]:
        """Gradient shards by number in ``tensors``, and the results of the collectives."""
        shards: dict[int, torch.Tensor] = {}
        arrived = []
        specs = [tensor.spec for tensor in tensors]
        dtypes = {number: full.dtype for number, full in fulls.items()}
        for one in plan_reductions(specs, dtypes, self.world, self.divisors, label=self.label):
            own = [tensors[number] for number in one.tensors]
            sent = [fulls[number].to(one.dtype) for number in one.tensors]
            if self.hook is not None:
                reduced = self.hook(one, own, sent)
            else:
                reduced = self.reduced(one, pack_gradients(sent, one))
            arrived.append(reduced)
            for number, tensor, piece in zip(
                one.tensors, own, split_shards(reduced, own), strict=True
            ):
                # The host widens what it receives, so fewer bytes are copied to it.
                stays = tensor.widens or piece.dtype == tensor.shard.dtype
                shards[number] = piece if stays else piece.to(tensor.shard.dtype)
        for number in fulls:
            if not tensors[number].layout.numel:
                shards[number] = torch.zeros_like(tensors[number].source)
        return shards, arrived

    def reduced(self, one: Collective, full: torch.Tensor, narrow: bool = False) -> torch.Tensor:
        """This rank's rows of the sum of ``full`` over all ranks, divided as ``one`` plans it.

        ``narrow``: the sum over replicas is computed in the dtype of ``full``, not in float32.
        """
        if one.divide_before != 1:
            full = full / one.divide_before
        shard = self.world.reduce_scatter(full, one.name, one.scale, one.route)
        if one.divide_after is None:
            return shard
        shard = self.world.sum_over_replicas(shard if narrow else to_float32(shard), one.name)
        return to_float32(shard) / one.divide_after


def pack_gradients(fulls: Sequence[torch.Tensor], one: Collective) -> torch.Tensor:
    """Full gradients that are reduced in one collective, joined rank by rank."""
    if len(fulls) == 1:
        return fulls[0]
    full = torch.cat([full.reshape(one.ranks, -1) for full in fulls], dim=1)
    return full.reshape(one.ranks * one.shape[0], *one.shape[1:])


def split_shards(reduced: torch.Tensor, tensors: Sequence[ShardedTensor]) -> Tensors:
    # No views: torch_xla keeps the base of a view in memory as long as the view lives.
    if len(tensors) == 1:
        return [torch.view_copy(reduced, tensors[0].layout.shard_shape)]
    flat, first, found = reduced.reshape(-1), 0, []
    for tensor in tensors:
        length = math.prod(tensor.layout.shard_shape)
        share = torch.slice_copy(flat, 0, first, first + length)
        found.append(share.reshape(tensor.layout.shard_shape))
        first += length
    return found


def _split(gathered: torch.Tensor, layouts: Sequence[Layout]) -> Tensors:
    """The result of one gather as ``(size * rows, ...)`` for each layout."""
    if len(layouts) == 1:
        return [gathered]
    size = layouts[0].size
    by_rank = gathered.view(size, -1)
    first, pieces = 0, []
    for layout in layouts:
        length = math.prod(layout.shard_shape)
        rows, *rest = layout.comm_shape
        piece = torch.slice_copy(by_rank, 1, first, first + length)
        pieces.append(piece.view(size * rows, *rest))
        first += length
    return pieces


@dataclass(eq=False)
class SecondaryShards:
    """Second shards, from a forward to its backward, of fewer ranks (ZeRO++, arXiv 2306.10209).

    ``reshard_after_forward=2`` on four ranks: each stores half of what the forward gathered, and
    the backward gathers from two ranks. Gradients are still reduced over all four.

    Attributes:
        world: the smaller group.
        pieces: this rank's part of the result of each gather, in the communication dtype, by the
            number of the first tensor in that gather. Emptied after the backward.
    """

    world: World
    shard_stamps: list[Stamp] = field(default_factory=list)
    pieces: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, number: int, gathered: torch.Tensor) -> torch.Tensor:
        """Stores this rank's part of ``gathered``, ``(rows, ...)``, as ``(rows / k, ...)``.

        Returns ``gathered``, tied to the part: otherwise the compiler would cut it in the backward.
        """
        parts = gathered.view(self.world.size, -1, *gathered.shape[1:])
        piece = torch.index_select(parts, 0, self.world.rank_on_device)[0]
        if self.world.as_on_tpu:
            gathered, piece = after([gathered, piece], [piece])
        self.pieces[number] = piece
        return gathered


def subgroup(world: World, size: int) -> World:
    """The world of this rank's group of ``size`` consecutive ranks."""
    groups = tuple(
        group[first : first + size]
        for group in world.groups
        for first in range(0, len(group), size)
    )
    # Routes go over a full slice.
    return replace(
        world, rank=world.rank % size, size=size, groups=groups, replica_groups=(), routes=None
    )
