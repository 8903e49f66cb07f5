"""The route of shards over the links of a TPU slice: in one collective, in stages, or around rings.

Stages: a reduce-scatter sums within groups of ranks, each of which keeps a part, and then across
groups; an all-gather does the reverse. A rank is a number with coordinates as digits, the slowest
first: z, y, x, core. After stages in another order, ranks exchange parts: with two digits of 2, the
fast one first, ranks 1 and 2 swap.

Rings: a part of a large gradient starts at its rank's neighbor, and every chip on the way adds its
values, overlapped with compute. Half of it goes each way. See docs/design/communication.md.

This module imports neither torch, torch_xla nor jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise, product, starmap
from typing import Any

from ..tpu.chips import chip_of
from ..tpu.links import Links, OneCollective
from ..tpu.slices import Groups
from ..tpu.topology import Slice, UnknownTopologyError, resolve

# Digits of a rank by stage. A digit is a coordinate's range, or a part of it.
_Stages = tuple[tuple[int, ...], ...]

COLLECTIVE_ROUTES = ("auto", "default")
# With their replacements. Kept for one release.
_REMOVED = {"modelled": "auto", "stages": "auto", "rings": "auto", "at_once": "default"}

# On v3-8, stages that the model predicts to be 7 % faster each made a step 5 % slower.
_WORTH = 0.9
# Of stages, the compiler overlaps and combines less than of one collective. `benchmarks.planned
# --table routes`: reductions that the model predicts to be 77 us shorter made steps 3 % shorter,
# those of 57 us or less, and gathers, 3 % shorter to 7 % longer.
_SAVED = 60e-6
# Rings are overlapped with compute, so they may take this much longer.
_AS_LONG = 1.1

# Lengths of rows that wrap around and whose chips have two neighbors.
SHORTEST_ROW, LONGEST_ROW = 4, 16

# Up to these bytes, all-gathers over this many ranks become all-reduces.
_MANY_RANKS, _SMALL_BYTES = 64, 1 << 24
# Above these bytes, the compiler pads parts of a reduce-scatter over a ring by about these rows.
_PADDED_BYTES, _PADDED_ROWS = 1 << 23, 32


def require_collective_routes(how: Any) -> Any:
    allowed = " or ".join(map(repr, COLLECTIVE_ROUTES))
    if isinstance(how, str) and how in _REMOVED:
        raise ValueError(
            f"collective_routes={how!r} was removed; allowed are {allowed}. Pass {_REMOVED[how]!r}"
        )
    if how not in COLLECTIVE_ROUTES:
        raise ValueError(
            f"collective_routes must be {allowed}, got {how!r}. Pass one of these, or leave it out"
        )
    return how


@dataclass(frozen=True)
class Rings:
    """Groups of ranks that each form a ring, in order; all rings run at the same time."""

    rings: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.rings[0])

    def pairs(self, way: int) -> list[tuple[int, int]]:
        """(sender, receiver) pairs, for direction ``way`` 0 (forward) or 1 (back)."""
        step = 1 if way == 0 else -1
        return [
            (rank, ring[(i + step) % len(ring)])
            for ring in self.rings
            for i, rank in enumerate(ring)
        ]

    def parts(self, rank: int) -> list[list[int]]:
        """For each direction, the half part to which ``rank`` adds at each step; its own is last.

        Halves ``2p`` (sent forward) and ``2p + 1`` (back) are for the ``p``-th rank.
        """
        ring = next(ring for ring in self.rings if rank in ring)
        part = {rank: number for number, rank in enumerate(sorted(ring))}
        at, size = ring.index(rank), len(ring)
        return [
            [2 * part[ring[(at - sign * (step + 1)) % size]] + way for step in range(size)]
            for way, sign in enumerate((1, -1))
        ]


@dataclass(frozen=True)
class Route:
    """How one collective over all ranks of a slice is executed.

    Attributes:
        stages: the groups of ranks of each stage of a reduce-scatter; an all-gather reverses them.
        moves: (sender, receiver) pairs, each rank once on either side, that put every part in
            place after a reduce-scatter or, reversed, before an all-gather.
        seconds: the time that the model predicts.
        rings: for a reduce-scatter, the rings of each stage, or ``None``.
    """

    stages: tuple[Groups, ...]
    moves: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    rings: tuple[Rings | None, ...] = ()

    @property
    def overlaps(self) -> bool:
        return any(rings is not None for rings in self.rings)


class Routes:
    def __init__(self, slice: Slice) -> None:
        self.slice = slice
        around = slice.chip.ring_bytes and all(slice.wraps)
        self._rows = slice.shape[:2] if around else ()
        self._links = Links(slice)
        self._known: dict[tuple[str, int, int], Route] = {}
        self._rings: dict[Groups, Rings | None] = {}

    def rings(self, groups: Groups, number_of_bytes: int) -> Rings | None:
        """Rings for a reduction of N bytes within ``groups``; ``None`` if they gain nothing."""
        if not self._rows or number_of_bytes < self.slice.chip.ring_bytes:
            return None
        if groups not in self._rings:
            places = [place[:2] for place in self.slice.coordinates()]
            self._rings[groups] = rings_of(groups, places, self._rows)
        return self._rings[groups]

    def scatter(self, number_of_bytes: int, row_bytes: int = 256) -> Route:
        """The fastest reduce-scatter of N bytes (the input of each rank), in rows of that size."""
        return self._fastest("reduce-scatter", number_of_bytes, row_bytes)

    def reduction(self, number_of_bytes: int, rows: int) -> Route:
        """:meth:`scatter` of N bytes in ``rows`` rows, with its rings."""
        route = self.scatter(number_of_bytes, number_of_bytes // rows)
        found = []
        for groups in route.stages:
            rings = self.rings(groups, number_of_bytes)
            fits = rings is not None and rows % (2 * rings.size) == 0
            found.append(rings if fits else None)
            rows //= len(groups[0])
        return replace(route, rings=tuple(found)) if any(found) else route

    def gather(self, number_of_bytes: int) -> Route:
        """The fastest all-gather that results in N bytes on each rank."""
        return self._fastest("all-gather", number_of_bytes)

    def all(self, kind: str, number_of_bytes: int, row_bytes: int = 256) -> list[Route]:
        """Every route, with predicted seconds; the first is a single collective."""
        found = []
        for route in starmap(Route, self._ways):
            sent = self.collectives(kind, number_of_bytes, row_bytes, route)
            found.append(replace(route, seconds=sum(map(self._links.seconds, sent))))
        return found

    def _fastest(self, kind: str, number_of_bytes: int, row_bytes: int = 256) -> Route:
        asked = kind, number_of_bytes, row_bytes
        if asked not in self._known:
            at_once, *others = self.all(*asked)
            # Of equally fast routes the first, which has the fewest stages.
            staged = min(others, key=lambda route: route.seconds, default=at_once)
            worth = staged.seconds < _WORTH * at_once.seconds
            if self.slice.chip.overlaps_gathers:
                saved = at_once.seconds - staged.seconds
                worth = worth and kind == "reduce-scatter" and saved > _SAVED
            if not worth and kind == "reduce-scatter" and self._rows:
                ringed = [r for r in others if self.rings(r.stages[0], number_of_bytes)]
                staged = min(ringed, key=lambda route: route.seconds, default=at_once)
                worth = staged.seconds < _AS_LONG * at_once.seconds
            self._known[asked] = staged if worth else at_once
        return self._known[asked]

    @cached_property
    def _ways(self) -> list[tuple[tuple[Groups, ...], tuple[tuple[int, int], ...]]]:
        lengths = [n for n in (*self.slice.device_shape[2::-1], self.slice.chip.devices) if n > 1]
        ways = []
        for split, stages in _orders(tuple(lengths), self.slice.chip.devices > 1):
            ranks = list(product(*map(range, split)))
            groups = tuple(_groups(ranks, stage) for stage in stages)
            target = _targets(ranks, stages)
            moves = () if target == list(range(len(ranks))) else tuple(enumerate(target))
            ways.append((groups, moves))
        return ways

    def collectives(
        self, kind: str, left: int, row_bytes: int, route: Route
    ) -> Iterator[OneCollective]:
        """Yields what libtpu makes of a collective of ``left`` bytes along ``route``."""
        for groups in route.stages:
            made, emitter = self._made(kind, left, groups)
            sent = left
            if made == "reduce-scatter" and left > _PADDED_BYTES:
                sent += _PADDED_ROWS * row_bytes * len(groups[0])
            yield OneCollective(made, sent, groups, emitter)
            left //= len(groups[0])
        if route.moves:
            yield OneCollective("collective-permute", left, route.moves)

    def _made(self, kind: str, number_of_bytes: int, groups: Groups) -> tuple[str, str]:
        """What libtpu makes of a collective: its kind, and "1D" for a single ring."""
        slice = self.slice
        if len(groups) > 1:
            return kind, "1D"
        if slice.chip.along_all_axes:
            return kind, ""
        if kind == "reduce-scatter":
            # An all-reduce uses all links, and sends twice the bytes.
            square = slice.shape[0] == slice.shape[1] and slice.devices > 4
            return ("all-reduce", "") if square else (kind, "1D")
        torus = all(slice.wraps) and not slice.chip.gathers_along_one_ring
        if torus or max(slice.shape) <= 2:
            return kind, ""
        many = slice.devices >= _MANY_RANKS and number_of_bytes <= _SMALL_BYTES
        if many and slice.chip.small_gathers_reduce:
            return "all-reduce", ""
        return kind, "1D"


def rings_of(
    groups: Sequence[Sequence[int]], places: Sequence[tuple[int, ...]], rows: Sequence[int]
) -> Rings | None:
    """A ring through the chips of each group; ``None`` if a group is no row that wraps around.

    ``places``: ``(x, y)`` of every rank's chip. ``rows``: chips along x and y, 0 if no ring.
    """
    rings = []
    for group in groups:
        path = _row([places[rank] for rank in group], rows)
        if path is None:
            return None
        rings.append(tuple(group[number] for number in path))
    return Rings(tuple(rings))


def _row(places: Sequence[tuple[int, ...]], rows: Sequence[int]) -> list[int] | None:
    """Indices of ``places`` along an axis that they fill and that wraps around."""
    for axis, length in enumerate(rows):
        along = {place[axis]: number for number, place in enumerate(places)}
        straight = len({place[1 - axis] for place in places}) == 1
        if straight and SHORTEST_ROW <= length == len(along) == len(places) <= LONGEST_ROW:
            return [along[at] for at in range(length)]
    return None


def routes_for(
    kind: str, attributes: Sequence[Mapping[str, object]], how: str = "auto"
) -> Routes | None:
    """The routes on the slice that a runtime describes; ``None`` if that is not one known slice.

    ``kind``: of its devices, such as "TPU v3". ``attributes``: of all devices, as
    ``global_runtime_device_attributes`` returns them. ``how``: of :data:`COLLECTIVE_ROUTES`.
    """
    if how == "default":
        return None
    if len({one.get("slice_index", 0) for one in attributes}) > 1:
        return None  # over several slices the compiler itself makes stages
    places = {}
    for one in attributes:
        number, coords = re.search(r"\d+$", str(one.get("name", ""))), one.get("coords")
        if number and isinstance(coords, Sequence) and len(coords) == 3:
            places[int(number[0])] = (*map(int, coords), int(str(one.get("core_on_chip", 0))))
    return _routes_among(kind, tuple(sorted(places.items())))


@lru_cache(maxsize=4)
def _routes_among(kind: str, places: tuple[tuple[int, tuple[int, ...]], ...]) -> Routes | None:
    """The routes between devices: number, coordinates and core of each."""
    chip = chip_of(kind)
    if chip is None or not places:
        return None
    shape = [1 + max(place[axis] for _, place in places) for axis in range(3)]
    name = "x".join(map(str, shape[: chip.torus_dimension]))
    try:
        routes = Routes(resolve(f"{chip.family}:{name}"))
    except UnknownTopologyError:
        return None
    return routes if tuple(enumerate(routes.slice.coordinates())) == places else None


def attributes_of(slice: Slice) -> list[dict[str, object]]:
    """The attributes that a runtime returns for devices of ``slice``."""
    return [
        {"name": f"TPU:{rank}", "coords": [x, y, z], "core_on_chip": core, "slice_index": number}
        for rank, (number, (x, y, z, core)) in enumerate(
            product(range(slice.count), slice.coordinates())
        )
    ]


def _orders(lengths: tuple[int, ...], cores: bool) -> Iterator[tuple[tuple[int, ...], _Stages]]:
    """Yields the lengths of digits, slowest first, and the stages that use them."""
    digits = tuple(range(len(lengths)))
    for cuts in range(max(len(digits), 1)):
        for ends in reversed([*combinations(digits[1:], cuts)]):
            bounds = pairwise((0, *ends, len(digits)))
            yield lengths, tuple(digits[first:end] for first, end in bounds)
    # Blocks that extend over the other axes, then across: a ring in a plane uses two links a chip.
    for axis, length in enumerate(lengths[: len(lengths) - cores]):
        for inner in range(2, length // 2 + 1):
            if length % inner == 0 and len(lengths) - cores > 1:
                split = (*lengths[:axis], length // inner, inner, *lengths[axis + 1 :])
                rest = tuple(d for d in range(len(split)) if d != axis)
                yield split, (rest, (axis,))


def _groups(ranks: Sequence[tuple[int, ...]], stage: Sequence[int]) -> Groups:
    """Of the ranks that differ only in the digits of ``stage``."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, digits in enumerate(ranks):
        key = tuple(digit for place, digit in enumerate(digits) if place not in stage)
        groups.setdefault(key, []).append(number)
    return tuple(map(tuple, groups.values()))


def _targets(ranks: Sequence[tuple[int, ...]], stages: _Stages) -> list[int]:
    """The part that each rank has after the last stage."""
    order = [place for stage in stages for place in stage]
    by_part = sorted(ranks, key=lambda digits: [digits[place] for place in order])
    parts = {digits: part for part, digits in enumerate(by_part)}
    return [parts[digits] for digits in ranks]
