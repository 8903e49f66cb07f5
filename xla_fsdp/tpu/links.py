"""Seconds of a collective on the links of a slice: docs/design/time-model.md has the formulas.

Sources: Patarasuk and Yuan, JPDC 69 (2), 2009; several axes in parallel: Jain and Sabharwal, ICS
2010; all-reduce: Rabenseifner, ICCS 2004.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from .slices import Groups
from .topology import Slice

_Position = tuple[int, int, int]  # of a chip
_Link = tuple[int, bool, _Position]  # axis, whether upwards, the chip that sends


def wire_bytes(kind: str, number_of_bytes: int, group_size: int) -> int:
    """Bytes that a device sends or receives, whichever is more."""
    if kind == "collective-permute":
        return number_of_bytes
    if group_size <= 1:
        return 0
    factor = 2 if kind == "all-reduce" else 1
    return factor * number_of_bytes * (group_size - 1) // group_size


@dataclass(frozen=True)
class OneCollective:
    """A collective on the links; ``planning/records.py`` has those of a program.

    Attributes:
        kind: as in HLO, such as "all-gather".
        bytes: of the larger of operand and result, without padding.
        groups: ranks, or pairs of source and target; () means all.
        emitter: the compiler's name of the algorithm, or "".
        across_slices: whether it uses the data-center network.
    """

    kind: str
    bytes: int
    groups: Groups
    emitter: str = ""
    across_slices: bool = False


@dataclass(frozen=True)
class GroupLinks:
    """The links between the ranks of one group.

    Attributes:
        cores: ranks on each chip.
        links: of a chip that send in parallel, 0 inside a chip.
        hops: between the chips farthest apart.
        crossing: what crosses the busiest link in an all-to-all, over the bytes of one rank.
        sharing: groups on the busiest link.
    """

    ranks: int
    cores: int
    links: int
    hops: int
    crossing: float
    sharing: int


def collective_seconds(collective: OneCollective, slice: Slice) -> float:
    """Modelled seconds of one execution of ``collective``, alone on the links of ``slice``.

    Raises ValueError for a rank that the slice does not have, or that is twice in a collective.
    """
    return Links(slice).seconds(collective)


def describe_links(slice: Slice) -> str:
    chip = slice.chip
    axes = ", ".join(
        f"{length} ({'ring' if wrap else 'line'})"
        for length, wrap in zip(slice.shape, slice.wraps, strict=True)
        if length > 1
    )
    if not axes:
        return "One chip, so no links between chips."
    cores = "; the ranks of a chip share its links" if chip.devices > 1 else ""
    if chip.die_bandwidth:
        cores += f" and exchange at {chip.die_bandwidth / 1e9:g} GB/s"
    between = ""
    if slice.count > 1:
        between = (
            f"; between slices {chip.dcn_bandwidth / 1e9:g} GB/s a chip one way "
            f"({chip.sources['dcn_bandwidth'].split(';')[0]}) and {chip.dcn_latency * 1e6:g} us, "
            "which is assumed"
        )
    return (
        f"Model: axes of {axes} chips, {chip.link_bandwidth / 1e9:.4g} GB/s a link one way, two "
        f"links a ring and one a line, all axes of a group in parallel but one ring for the "
        f"compiler's 1D algorithms{cores}; {chip.hop_latency * 1e6:.3g} us a hop and "
        f"{chip.launch_latency * 1e6:.3g} us a collective; groups that are no grid of chips as "
        f"rings of shortest paths one way "
        f"(bandwidth: {chip.sources['link_bandwidth'].split(';')[0]}){between}."
    )


class Links:
    """The links of one slice. Caches those of groups."""

    def __init__(self, slice: Slice) -> None:
        self._slice = slice
        self._places = slice.coordinates()
        self._shape = slice.device_shape[:3]
        wraps = (*slice.wraps, False)[:3]
        self._wraps = tuple(w and n > 2 for w, n in zip(wraps, self._shape, strict=True))
        self._known: dict[Groups, tuple[GroupLinks, ...]] = {}
        self._loads: dict[Groups, tuple[Counter[_Link], int]] = {}  # of permutes

    def seconds(self, collective: OneCollective) -> float:
        if collective.across_slices:
            return self._between(collective)
        if collective.kind == "collective-permute":
            return self._permute(collective)
        groups = self.of_groups(collective.groups)
        return max((self._within(group, collective) for group in groups), default=0.0)

    def used(self, collective: OneCollective) -> Collection[_Link] | None:
        """The links, one way each, that a permute uses; ``None``, all of them, for other kinds."""
        if collective.kind != "collective-permute":
            return None
        return self._load_of(collective.groups)[0].keys()

    def of_groups(self, groups: Groups) -> tuple[GroupLinks, ...]:
        """The different links of ``groups`` of ranks, used at the same time; () means all.

        Raises ValueError for a rank that the slice does not have, or that is in two groups.
        """
        if groups not in self._known:
            every = groups or (tuple(range(len(self._places))),)
            self._check([rank for group in every for rank in group])
            self._known[groups] = tuple(dict.fromkeys(self._links_of(every)))
        return self._known[groups]

    def _check(self, ranks: Sequence[int]) -> None:
        count = len(self._places)
        for rank, times in Counter(ranks).items():
            if not 0 <= rank < count or times > 1:
                wrong = "twice in a collective" if times > 1 else "not on this slice"
                raise ValueError(f"rank {rank} is {wrong}: {self._slice.name} has {count} ranks")

    def _within(self, group: GroupLinks, collective: OneCollective) -> float:
        chip = self._slice.chip
        if group.ranks < 2:
            return 0.0
        sent = wire_bytes(collective.kind, collective.bytes, group.ranks)
        if not group.links:
            return self._inside(sent)
        links, hops = group.links, group.hops
        emitter = collective.emitter  # one ring: "1DAllGatherNonMajorDim", but not "StrategyND"
        if emitter.startswith("1D") or ("Ring" in emitter and "ND" not in emitter):
            links, hops = min(links, 2), max(hops, group.ranks // group.cores // 2)
        if collective.kind == "all-to-all":
            load = group.crossing * collective.bytes
        else:
            load = sent / links
        phases = 2 if collective.kind == "all-reduce" else 1
        latency = chip.launch_latency + phases * hops * chip.hop_latency
        return latency + group.sharing * load / chip.link_bandwidth

    def _inside(self, sent: int) -> float:
        chip = self._slice.chip
        if chip.die_bandwidth:
            return chip.launch_latency + sent / chip.die_bandwidth
        # Read and written once. An assumption: nothing public says how cores exchange.
        return chip.launch_latency + 2 * sent / chip.device_hbm_bandwidth

    def _between(self, collective: OneCollective) -> float:
        chip = self._slice.chip
        if not chip.dcn_bandwidth:
            raise ValueError(f"slices of {chip.family} are not joined: {collective.kind}")
        phases = 2 if collective.kind == "all-reduce" else 1
        sent = wire_bytes(collective.kind, collective.bytes, len(collective.groups[0]))
        latency = chip.launch_latency + phases * chip.dcn_latency
        return latency + sent * chip.devices / chip.dcn_bandwidth

    def _permute(self, collective: OneCollective) -> float:
        chip, (load, hops) = self._slice.chip, self._load_of(collective.groups)
        if not hops:
            return self._inside(collective.bytes)
        time = max(load.values()) * collective.bytes / chip.link_bandwidth
        return chip.launch_latency + hops * chip.hop_latency + time

    def _load_of(self, pairs: Groups) -> tuple[Counter[_Link], int]:
        if pairs not in self._loads:
            for ends in zip(*pairs, strict=True):
                self._check(ends)
            self._loads[pairs] = self._paths_of(pairs)
        return self._loads[pairs]

    def _links_of(self, groups: Groups) -> Iterator[GroupLinks]:
        chips = [Counter(self._places[rank][:3] for rank in group) for group in groups]
        grids = [sides for count in chips if (sides := _grid(count)) is not None]
        if len(grids) < len(groups):
            yield self._astray(groups)
            return
        used = [{link for axis in range(3) for link in self._links(axis, grid)} for grid in grids]
        load = Counter(link for links in used for link in links)
        for group, count, grid, own in zip(groups, chips, grids, used, strict=True):
            cores, links, hops, crossing = len(group) // len(count), 0, 0, 0.0
            for axis, at in enumerate(grid):
                size, half = len(at), len(at) // 2
                if size < 2:
                    continue
                ways = 2 if self._closes(axis, at) else 1
                links += ways
                hops += self._shape[axis] // 2 if ways == 2 else at[-1] - at[0]
                crossing = max(crossing, cores * half * (size - half) / size / ways)
            sharing = max((load[link] for link in own), default=1)
            yield GroupLinks(len(group), cores, links, hops, crossing, sharing)

    def _closes(self, axis: int, at: Sequence[int]) -> bool:
        length = self._shape[axis]
        return self._wraps[axis] and list(at) == list(range(at[0], length, length // len(at)))

    def _links(self, axis: int, sides: Sequence[Sequence[int]]) -> Iterator[tuple[int, _Position]]:
        """The axis, and the chip at the lower end, of links that a grid uses along it."""
        at = sides[axis]
        if len(at) < 2:
            return
        steps = range(self._shape[axis]) if self._closes(axis, at) else range(at[0], at[-1])
        for x, y, z in product(*(steps if a == axis else s for a, s in enumerate(sides))):
            yield axis, (x, y, z)

    def _astray(self, groups: Groups) -> GroupLinks:
        pairs = [pair for g in groups if len(g) > 1 for pair in zip(g, (*g[1:], g[0]), strict=True)]
        load, hops = self._paths_of(pairs)
        ranks, busiest = max(map(len, groups)), max(load.values(), default=1)
        return GroupLinks(ranks, 1, 1, (ranks - 1) * max(hops, 1), (ranks - 1) / 2, busiest)

    def _paths_of(self, pairs: Iterable[Sequence[int]]) -> tuple[Counter[_Link], int]:
        """Pairs of ranks that each link serves, and the longest path."""
        load: Counter[_Link] = Counter()
        longest = 0
        for source, target in pairs:
            path = list(self._path(self._places[source][:3], self._places[target][:3]))
            load.update(path)
            longest = max(longest, len(path))
        return load, longest

    def _path(self, source: _Position, target: _Position) -> Iterator[_Link]:
        at = list(source)
        for axis, length in enumerate(self._shape):
            up = (target[axis] - at[axis]) % length
            upwards = up <= length - up if self._wraps[axis] else target[axis] > at[axis]
            while at[axis] != target[axis]:
                yield axis, upwards, (at[0], at[1], at[2])
                at[axis] = (at[axis] + (1 if upwards else -1)) % length


def _grid(chips: Counter[_Position]) -> tuple[list[int], ...] | None:
    """The places along each axis, if chips are all combinations of them, equally often each."""
    if len(set(chips.values())) != 1:
        return None
    sides = tuple(sorted(set(places)) for places in zip(*chips, strict=True))
    return sides if len(chips) == len(sides[0]) * len(sides[1]) * len(sides[2]) else None
