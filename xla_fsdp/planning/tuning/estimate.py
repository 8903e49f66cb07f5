"""Estimates time and memory of a step with given settings, without tracing or compiling it.

``planning/timing.py`` times the step as a schedule of units. A backward computes twice its forward,
and the forward again if it is recomputed. Estimates only rank candidates, and results of compiled
candidates correct them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ...collectives.routes import Routes
from ...tpu.links import Links, OneCollective
from ...tpu.topology import Slice
from ..records import CompiledCollective, HostCopy, Op, Schedule
from ..timing import time_step
from ..tracing.units import OnWire
from .facts import StepFacts, UnitFacts
from .settings import ShardingSettings, keeps

# Code of a separate block: workload S on v3-8 has 50 MiB for four blocks, 393 MiB for 32
# (docs/how-to/scan-layers.md).
CODE_BYTES = 12 << 20


@dataclass(frozen=True, kw_only=True)
class UnitCollective(CompiledCollective):
    """All gathers or all reductions of a unit at one place."""

    parts: tuple[OneCollective, ...] = ()


class UnitLinks(Links):
    """The links of a slice, for the collectives of units; caches results, as blocks are alike."""

    def __init__(self, where: Slice) -> None:
        super().__init__(where)
        self.where = where
        self._ways = Routes(where)
        self.parts, self.on_rings = cache(self._parts), cache(self._on_rings)
        self._total = cache(self._sum)

    def seconds(self, collective: OneCollective) -> float:
        if isinstance(collective, UnitCollective):
            return self._total(collective.parts)
        return super().seconds(collective)

    def _sum(self, parts: tuple[OneCollective, ...]) -> float:
        return sum(map(super().seconds, parts))

    def _parts(
        self, kind: str, tensors: tuple[OnWire, ...], ranks: int, routes: str
    ) -> tuple[OneCollective, ...]:
        """Over groups of ``ranks`` consecutive ranks; an all-reduce: over the copies of their
        shards.
        """
        return tuple(part for one in tensors for part in self._of(kind, one, ranks, routes))

    def _of(self, kind: str, tensor: OnWire, ranks: int, routes: str) -> Iterator[OneCollective]:
        where, size = self.where, tensor.bytes
        one = where.devices // where.count  # ranks of one slice
        if kind == "all-reduce":
            if where.count > 1 and ranks < where.devices:
                yield self._over_network(kind, size // ranks, where.count)
            if ranks < one:
                groups = tuple(tuple(range(first, one, ranks)) for first in range(ranks))
                yield OneCollective(kind, size // ranks, groups)
        elif ranks > one:
            yield self._over_network(kind, size // one, ranks // one)
            yield from self._of(kind, tensor, one, routes)
        elif ranks == one and where.count == 1:
            row, ways = max(size // max(tensor.rows, 1), 1), self._ways
            if routes == "default":
                route = ways.all(kind, size, row)[0]
            else:
                route = ways.gather(size) if kind == "all-gather" else ways.scatter(size, row)
            yield from ways.collectives(kind, size, row, route)
        elif ranks > 1:
            groups = tuple(tuple(range(at, at + ranks)) for at in range(0, one, ranks))
            yield OneCollective(kind, size, groups)

    def _over_network(self, kind: str, size: int, slices: int) -> OneCollective:
        """Each device sends its part of the data (docs/design/time-model.md)."""
        return OneCollective(kind, size, (tuple(range(slices)),), across_slices=True)

    def _on_rings(self, tensors: tuple[OnWire, ...], ranks: int, routes: str) -> tuple[OnWire, ...]:
        if ranks != self.where.devices or self.where.count > 1 or routes == "default":
            return ()
        rings = (one for one in tensors if self._ways.reduction(one.bytes, one.rows).overlaps)
        return tuple(rings)


@dataclass(frozen=True)
class Estimate:
    """One step on one device.

    ``hbm``: bytes, of which ``state`` does not depend on how the model is computed.
    """

    compute: float
    exposed: float
    hbm: float
    state: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


class Estimates:
    """``facts``: by ``ShardingSettings.units``; those of ``"blocks"`` are also used for
    ``"model"``.
    """

    def __init__(self, facts: dict[str | int, StepFacts], where: Slice) -> None:
        self._facts = facts
        self._where = where
        # Results over estimates, by figure and kind of candidate.
        self._ratios: dict[str, dict[tuple[str, bool], list[float]]] = {}
        self.of, self._memory = cache(self._estimate), cache(self._hbm)

    def on(self, where: Slice) -> Estimates:
        """Estimates on another slice, which share the corrections."""
        other = Estimates(self._facts, where)
        other._ratios = self._ratios
        return other

    @cached_property
    def links(self) -> UnitLinks:
        return UnitLinks(self._where)

    def facts(self, settings: ShardingSettings) -> StepFacts:
        key = "blocks" if settings.units == "model" else settings.units
        found = self._facts[key]
        return found if settings.batch is None else found.scaled(settings.batch)

    def corrected(self, settings: ShardingSettings) -> Estimate:
        """The estimate, multiplied by the mean ratio of results over estimates of its kind
        (``kind_of``); without any, of that kind without ``keep`` and ``scan_prefetch``, or of all.
        """
        found = self.of(settings)
        return replace(
            found,
            compute=found.compute * self._ratio("compute", settings),
            exposed=found.exposed * self._ratio("exposed", settings),
            hbm=self.needed(settings),
        )

    def needed(self, settings: ShardingSettings) -> float:
        state, working = self._memory(settings)
        return state + working * self._ratio("hbm", settings)

    def learn(
        self, settings: ShardingSettings, hbm: float, compute: float = 0.0, exposed: float = 0.0
    ) -> None:
        """Record the compiler's result; times are 0 if the step does not fit."""
        found, kind = self.of(settings), kind_of(settings)
        for name, measured, guessed in (
            ("compute", compute, found.compute),
            ("exposed", exposed, found.exposed),
            ("hbm", hbm - found.state, found.hbm - found.state),
        ):
            if measured > 0 and guessed > 0:
                ratios = self._ratios.setdefault(name, {})
                ratios.setdefault(kind, []).append(measured / guessed)

    def knows(self, settings: ShardingSettings) -> bool:
        return kind_of(settings) in self._ratios.get("hbm", {})

    def _ratio(self, name: str, settings: ShardingSettings) -> float:
        known, plain = self._ratios.get(name, {}), settings.changed(keep=(), scan_prefetch=False)
        ratios = known.get(kind_of(settings)) or known.get(kind_of(plain))
        ratios = ratios or [one for some in known.values() for one in some]
        return sum(ratios) / len(ratios) if ratios else 1.0

    def _estimate(self, settings: ShardingSettings) -> Estimate:
        state, working = self._memory(settings)
        units = self._units(settings)
        timing = time_step(self._schedule(units, settings), self._where, 0.0, links=self.links)
        exposed = timing.exposed + timing.copies
        return Estimate(timing.compute, exposed, state + working, state)

    def _schedule(self, units: Sequence[_UnitEstimate], settings: ShardingSettings) -> Schedule:
        """A unit's forward is one operation, as its backward."""
        state, chip, count = self.facts(settings).state, self._where.chip, len(units)
        shared, hertz = settings.shard_group_size or self._where.devices, chip.clock_hz
        routes, one_loop = settings.collective_routes, settings.scan
        overlaps = chip.overlaps_gathers and (settings.scan_prefetch or not one_loop)
        ops: list[Op] = []
        sent: list[CompiledCollective] = []
        copies: list[HostCopy] = []

        def compute(at: int, seconds: float, phase: str) -> None:
            ops.append(Op(at, "", "", round(seconds * hertz), phase=phase))

        def send(
            kind: str, tensors: tuple[OnWire, ...], at: int, done: int, ranks: int = shared
        ) -> None:
            parts = self.links.parts(kind, tensors, ranks, routes)
            if parts:
                size = sum(one.bytes for one in tensors)
                sent.append(UnitCollective(
                    kind, size, (), across_slices=all(part.across_slices for part in parts),
                    index=at, done=done, name="", asked=kind, dtype="", group_size=ranks,
                    wire_bytes=size, asynchronous=done > at, parts=parts,
                ))  # fmt: skip

        # Units compute at odd places, first all forwards; gradients are reduced at even places.
        early, end = settings.forward_prefetch or one_loop, 2 * count + 1
        for at, unit in zip(range(1, end, 2), units, strict=True):
            start = at - 2 if overlaps and early and at > 1 else at
            send("all-gather", unit.facts.gathered, start, at)
            compute(at, unit.facts.forward, "forward")
            if unit.on_host:  # the device has the inputs of two blocks
                copies.append(HostCopy(at, min(at + 4, end), round(unit.on_host), to_host=True))
        early = settings.backward_prefetch == "pre" or one_loop
        for at, unit in zip(range(end, 2 * end - 1, 2), reversed(units), strict=True):
            before = at - 2 if at > end else at
            if not unit.kept:
                start, ranks = before if overlaps and early else at, unit.kept_among or shared
                send("all-gather", unit.facts.gathered, start, at, min(ranks, shared))
            if unit.on_host:
                copies.append(HostCopy(before, at, round(unit.on_host), to_host=False))
            compute(at, unit.backward, "backward")
            reduced = unit.facts.reduced
            rings = self.links.on_rings(reduced, shared, routes)
            send("reduce-scatter", tuple(o for o in reduced if o not in rings), at + 1, at + 1)
            alone = one_loop and not settings.scan_prefetch  # the iteration waits for it
            send("reduce-scatter", rings, at + alone, at + 1)
            send("all-reduce", reduced, at + 1, at + 1)
            # Of every byte on a ring the chip reads two and writes one.
            added = 3 * sum(one.bytes for one in rings)
            compute(at, added / chip.device_hbm_bandwidth, "backward")
        compute(2 * end, 2 * state / shared / chip.device_hbm_bandwidth, "optimizer")
        return Schedule(
            2 * end + 1, tuple(ops), tuple(sent), (), (0,), 0, host_copies=tuple(copies)
        )

    def _hbm(self, settings: ShardingSettings) -> tuple[float, float]:
        """Bytes: those that do not depend on how the model is computed, and the others."""
        units = self._units(settings)
        facts, shared = self.facts(settings), settings.shard_group_size or self._where.devices
        state = (facts.state + 4 * sum(unit.facts.trainable for unit in units)) / shared
        gathered = [units] if settings.units == "model" else [[unit] for unit in units]
        programs = 2 + 2 * settings.scan_prefetch if settings.scan else len(units)
        working = _activations(units) + CODE_BYTES * programs + _peak_of_full(gathered, settings)
        return state + facts.inputs, working

    def routes_matter(self, settings: ShardingSettings) -> bool:
        """Whether another ``collective_routes`` changes the route of any collective."""
        if settings.shard_group_size not in (None, self._where.devices):
            return False  # only collectives over an entire slice have several routes
        links, ranks = self.links, self._where.devices
        return any(
            links.parts(kind, tensors, ranks, "auto")
            != links.parts(kind, tensors, ranks, "default")
            or links.on_rings(tensors, ranks, "auto")
            for unit in self.facts(settings).units
            for kind, tensors in (("all-gather", unit.gathered), ("reduce-scatter", unit.reduced))
        )

    def _units(self, settings: ShardingSettings) -> list[_UnitEstimate]:
        facts = self.facts(settings)
        rest = len(facts.units) - len(facts.blocks)
        return [
            _UnitEstimate(one, settings, number - rest) for number, one in enumerate(facts.units)
        ]


class _UnitEstimate:
    """One unit in bytes and seconds. ``number``: of the block; negative for other units."""

    def __init__(self, facts: UnitFacts, settings: ShardingSettings, number: int) -> None:
        self.facts = facts
        recompute = settings.recompute
        some = isinstance(recompute, int) and number < recompute
        self.recomputed = facts.is_block and (recompute == "all" or some)
        self.full = facts.elements * facts.itemsize
        self.full_gradient = facts.trainable * facts.itemsize
        spared = [one for one in facts.again if one.name in settings.keep]
        self.backward = (3 if self.recomputed else 2) * facts.forward
        self.backward -= sum(one.seconds for one in spared)
        self.spared = sum(one.bytes for one in spared)
        reshard = settings.reshard_after_forward
        # The root always keeps its parameters: its backward follows immediately.
        chosen = keeps(settings.kept_blocks, number, facts.name)
        root = settings.units == "model" or not facts.is_block
        self.kept = reshard is False or root or chosen
        self.kept_among = 0 if isinstance(reshard, bool) or self.kept else reshard
        self.saved = facts.saved_recomputed if self.recomputed else facts.saved
        self.on_host = self.saved if self.recomputed and settings.offload else 0.0


def _activations(units: Sequence[_UnitEstimate]) -> float:
    on_device = [unit.saved for unit in units if not unit.on_host]
    on_device += [unit.spared for unit in units]
    # On the device: the input of the running block and that of the next.
    on_host = sorted((unit.on_host for unit in units if unit.on_host), reverse=True)[:2]
    again = max((unit.facts.saved for unit in units if unit.recomputed), default=0.0)
    working = 2 * max(unit.facts.largest for unit in units)
    return sum(on_device) + sum(on_host) + again + working


def _peak_of_full(gathered: Sequence[Sequence[_UnitEstimate]], settings: ShardingSettings) -> float:
    """The most bytes of full parameters and full gradients at the same time."""
    early = settings.scan_prefetch if settings.scan else settings.forward_prefetch
    at_a_time = 2 if early else 1
    full = [(sum(unit.full for unit in one), one[0]) for one in gathered]
    passing = sorted((size for size, one in full if not one.kept), reverse=True)[:at_a_time]
    kept = sum(size for size, one in full if one.kept)
    kept += sum(size // one.kept_among for size, one in full if one.kept_among)
    gradients = sorted((sum(unit.full_gradient for unit in one) for one in gathered), reverse=True)
    few = gradients[:at_a_time] if settings.limit_all_gathers else gradients
    return sum(passing) + kept + sum(few)


def kind_of(settings: ShardingSettings) -> tuple[str, bool]:
    """How blocks are computed; candidates of one kind share corrections."""
    how = "host" if settings.offload else str(settings.recompute)
    more = " kept" * bool(settings.keep) + " ahead" * settings.scan_prefetch
    return how + more, settings.scan
