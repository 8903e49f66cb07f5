"""Collectives of several sizes along each axis of the slice, timed on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..collectives.world import World
from ..sharding.once import Tensors
from ..tpu.links import collective_seconds
from ..tpu.slices import Groups
from ..tpu.topology import Slice
from ..tpu.traffic import OneCollective
from .records import CollectiveTime
from .timing import Stopwatch

# Bytes, rounded down to float32 elements for each rank.
ON_TPU = tuple(1 << n for n in (13, 17, 20, 24, 26))
ON_CPU = tuple(1 << n for n in (13, 17))
_SHORTEST = 20e-6  # seconds that one is taken to last where no model says
_LONG = 20e-3  # seconds that a loop should last
_MOST_TIMES = 400


@dataclass(frozen=True)
class Axis:
    """Groups that act at once; ``around``: each rank and the next one of its group."""

    name: str
    groups: Groups

    @property
    def around(self) -> Groups:
        return tuple(
            (group[i], group[(i + 1) % len(group)])
            for group in self.groups
            for i in range(len(group))
        )


def axes(ranks: int, slice: Slice | None) -> list[Axis]:
    """All ranks, and along each axis of the slice; without one as if they were two rows."""
    found = [Axis("all", (tuple(range(ranks)),))]
    if slice is not None:
        places = [*slice.coordinates()]
        names = [f"{'xyz'[n]}, {length}" for n, length in enumerate(slice.device_shape[:3])]
        names.append(f"cores, {slice.chip.devices}")
    else:
        half = ranks // 2 if ranks > 2 and ranks % 2 == 0 else 0
        places = [(rank % half, rank // half, 0, 0) for rank in range(ranks)] if half else []
        names = [f"rows, {half}", "columns, 2", "", ""]
    for axis, name in enumerate(names):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        together = tuple(tuple(group) for group in groups.values())
        if together and 1 < len(together[0]) < ranks:
            found.append(Axis(name, together))
    return found


def modelled(time: CollectiveTime, slice: Slice | None) -> float | None:
    """Seconds by ``tpu/links.py``; ``None`` where the slice is unknown."""
    if slice is None:
        return None
    return collective_seconds(OneCollective(time.kind, time.bytes, time.groups), slice)


def measure(
    watch: Stopwatch, world: World, slice: Slice | None, sizes: tuple[int, ...], go_on: Callable
) -> Iterator[CollectiveTime]:
    """Times each kind on each axis at each size; call on every rank.

    ``world``: all ranks. ``go_on()``: asked before each, on every rank; ends the measuring.
    """
    for axis in axes(world.size, slice):
        group = next(group for group in axis.groups if world.rank in group)
        place = group.index(world.rank)
        among = World(
            place, len(group), axis.groups, world.device, context=world.context
        )  # without routes: over all links of the group at once, as the compiler likes
        for wanted in sizes:
            size = wanted // (4 * len(group)) * 4 * len(group)
            # What each measures is one collective, but the second, which is also a gather.
            gather = 0.0
            for kind in ("all-gather", "reduce-scatter", "all-reduce", "collective-permute"):
                if not go_on():
                    return
                groups = axis.around if kind == "collective-permute" else axis.groups
                time = CollectiveTime(kind, axis.name, groups, size, 0.0)
                model = modelled(time, slice)
                times = round(_LONG / max(model or 0.0, _SHORTEST))
                times = 4 if world.context is not None else max(8, min(times, _MOST_TIMES))
                body, carry, constants = _loop(watch, among, kind, size, axis)
                seconds = watch.seconds(body, carry, constants, times)
                if kind == "all-gather":
                    gather = seconds
                elif kind == "reduce-scatter":
                    seconds = max(seconds - gather, 1e-9)
                yield CollectiveTime(kind, axis.name, groups, size, seconds, model)


def _loop(
    watch: Stopwatch, among: World, kind: str, size: int, axis: Axis
) -> tuple[Callable, list[torch.Tensor], list[torch.Tensor]]:
    """A body for a loop, and what it begins with. What one iteration ends with is what the next one
    needs, so that none can be left out; zeros remain zeros however often they are added up."""
    count = size // 4

    def all_gather(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        full = among.all_gather(carry[0]).view(among.size, -1)
        return [full.index_select(0, constants[0]).view(-1)], []

    def reduce_scatter(
        carry: Tensors, rows: Tensors, constants: Tensors
    ) -> tuple[Tensors, Tensors]:
        return [among.all_gather(among.reduce_scatter(carry[0]))], []

    def all_reduce(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        return [among.all_reduce_sum(carry[0])], []

    def permute(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        return [among.permute(carry[0], axis.around)], []

    if kind == "all-gather":
        # Its own part again, by data: the compiler does not see that the others are not needed.
        own = watch.sent(torch.tensor([among.rank]))
        return all_gather, [watch.sent(torch.zeros(count // among.size))], [own]
    body = {
        "reduce-scatter": reduce_scatter, "all-reduce": all_reduce, "collective-permute": permute
    }[kind]  # fmt: skip
    return body, [watch.sent(torch.zeros(count))], []
