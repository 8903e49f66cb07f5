"""Estimate time and memory of a step with given settings, without tracing or compiling it.

Time is compute plus the exposed collectives, which do not overlap with compute.

* Compute of a unit: its forward once, its backward twice that (``program/flops.py`` has the
  source), and its forward again if it is recomputed. The optimizer reads and writes its state once
  at the bandwidth of HBM.
* Parameters are gathered for the forward, and again for the backward unless they are kept;
  gradients are reduced. If the compiler overlaps gathers with compute, the gather of a unit
  overlaps with the compute of the unit before it. Everything else is exposed.
* The tensors of a unit are sent in several collectives, see ``sharding/comm_plan.py``. Each large
  one has a separate collective, whose route over the links depends on its bytes.

Memory is the sum of: sharded parameters, optimizer state and gradients; what the forward saves for
the backward; full parameters and gradients of the units that have them at the same time; and the
working memory of one unit. All figures are of one device. Estimates only rank candidates; the
results of compiled candidates correct them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ...collectives.routes import Routes
from ...sharding.comm_plan import SMALL_BYTES
from ...sharding.layout import LANES
from ...tpu.links import Links, OneCollective
from ...tpu.topology import Slice
from ..tracing.units import OnWire
from .facts import StepFacts, UnitFacts
from .settings import ShardingSettings, keeps

# Code size for every block that is compiled separately: 50 MiB for four blocks of workload S on
# v3-8, 393 MiB for 32 (docs/how-to/scan-layers.md).
CODE_BYTES = 12 << 20
# The share by which scan_prefetch=True increases compute. It is the mean of two plans with very
# different results: 10 % more for GPT-3 13B on v5litepod-64, 5 % less for ViT-10B on v5litepod-256
# (docs/design/benchmarks.md).
AHEAD = 0.03


class Reducing(NamedTuple):
    """Seconds of the reductions of a unit.

    ``waited``: reductions for which compute waits. ``beside``: ring reductions, which overlap with
    compute. ``adding``: the additions of ring reductions, which the chip computes itself: it reads
    two values and writes one.
    """

    waited: float
    beside: float
    adding: float


def collectives(tensors: Iterable[OnWire]) -> tuple[OnWire, ...]:
    """The collectives for ``tensors``: one for all small ones, and one for each large one."""
    tensors = tuple(tensors)
    size = sum(one.bytes for one in small(tensors))
    together = (OnWire(size, max(size // (2 * LANES), 1)),) if size else ()  # elements of 16 bits
    return together + large(tensors)


def small(tensors: Iterable[OnWire]) -> tuple[OnWire, ...]:
    return tuple(one for one in tensors if one.bytes <= SMALL_BYTES)


def large(tensors: Iterable[OnWire]) -> tuple[OnWire, ...]:
    return tuple(one for one in tensors if one.bytes > SMALL_BYTES)


class Wire:
    """Seconds of the collectives of a unit on ``where``."""

    def __init__(self, where: Slice) -> None:
        self._where = where
        self._links = Links(where)
        self._routes = Routes(where)
        self.seconds = lru_cache(maxsize=None)(self._seconds)
        # Cached, because blocks are alike and every candidate needs these.
        self.gathering = lru_cache(maxsize=None)(self._gathering)
        self.reducing = lru_cache(maxsize=None)(self._reducing)

    def _gathering(self, tensors: tuple[OnWire, ...], ranks: int, routes: str) -> float:
        """Seconds of the gathers of ``tensors`` over groups of ``ranks`` consecutive ranks."""
        sent = collectives(tensors)
        return sum(self.seconds("all-gather", one.bytes, ranks, routes) for one in sent)

    def _reducing(self, tensors: tuple[OnWire, ...], ranks: int, routes: str) -> Reducing:
        waited = beside = adding = 0.0
        for one in collectives(tensors):
            seconds = self.seconds("reduce-scatter", one.bytes, ranks, routes)
            whole = ranks == self._where.devices and self._where.count == 1 and routes != "default"
            if whole and self._routes.reduction(one.bytes, one.rows).overlaps:
                beside += seconds
                adding += 3 * one.bytes / self._where.chip.device_hbm_bandwidth
            else:
                waited += seconds
        return Reducing(waited, beside, adding)

    def _seconds(self, kind: str, size: int, ranks: int, routes: str = "auto") -> float:
        """Seconds of one collective over groups of ``ranks`` consecutive ranks.

        ``kind``: "all-gather", "reduce-scatter" or "all-reduce"; ``size``: bytes of the larger of
        operand and result.
        """
        devices = self._where.devices
        if ranks <= 1 or not size:
            return 0.0
        one = devices // self._where.count  # ranks of one slice
        if ranks > one:
            return self._between(kind, size, ranks // one) + self.seconds(kind, size, one)
        if ranks == one and self._where.count == 1 and kind != "all-reduce":
            if routes == "default":
                return self._routes.all(kind, size)[0].seconds
            gathers, ways = kind == "all-gather", self._routes
            return (ways.gather(size) if gathers else ways.scatter(size)).seconds
        groups = tuple(tuple(range(first, first + ranks)) for first in range(0, one, ranks))
        return self._links.seconds(OneCollective(kind, size, groups))

    def replicas(self, size: int, ranks: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes over the copies of the parameters, each of
        which is sharded over ``ranks`` consecutive ranks."""
        devices, count = self._where.devices, self._where.count
        one = devices // count
        if ranks >= devices:
            return 0.0
        between = self._between("all-reduce", size, count) if count > 1 else 0.0
        if ranks >= one:
            return between
        groups = tuple(tuple(range(first, one, ranks)) for first in range(ranks))
        return between + self._links.seconds(OneCollective("all-reduce", size, groups))

    def _between(self, kind: str, size: int, slices: int) -> float:
        """Seconds over the data-center network, where each device sends its part of the data
        (docs/design/time-model.md)."""
        one = self._where.devices // self._where.count
        part = size if kind == "all-reduce" else size // one
        group = tuple(range(slices))
        return self._links.seconds(OneCollective(kind, part, (group,), across_slices=True))


@dataclass(frozen=True)
class Estimate:
    """Estimate of one step on one device.

    ``seconds`` = ``compute`` + ``exposed``; ``hbm``, ``host``: bytes. ``state``: the part of
    ``hbm`` that does not depend on how the model is computed.
    """

    compute: float
    exposed: float
    hbm: float
    state: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


class Estimates:
    """Estimates of one model on one slice.

    Args:
        facts: by ``ShardingSettings.units``; those of ``"blocks"`` are also used for ``"model"``.
    """

    def __init__(self, facts: dict[str | int, StepFacts], where: Slice) -> None:
        self._facts = facts
        self._where = where
        # By figure and kind of candidate: the compiler's results over the estimates so far.
        self._ratios: dict[str, dict[tuple[str, bool], list[float]]] = {}
        self.of = lru_cache(maxsize=None)(self._of)
        self._memory = lru_cache(maxsize=None)(self._memory_of)

    def on(self, where: Slice) -> Estimates:
        """Estimates of the model on another slice, with the same corrections."""
        other = Estimates(self._facts, where)
        other._ratios = self._ratios
        return other

    @cached_property
    def wire(self) -> Wire:
        """The slice's links."""
        return Wire(self._where)

    def facts(self, settings: ShardingSettings) -> StepFacts:
        """The facts of the model with the units and batch of ``settings``."""
        key = "blocks" if settings.units == "model" else settings.units
        found = self._facts[key]
        return found if settings.batch is None else found.scaled(settings.batch)

    def corrected(self, settings: ShardingSettings) -> Estimate:
        """The estimate, multiplied by the mean ratio of results of candidates that compute blocks
        in the same way (recomputed or not, in a loop or not); without any, of all results."""
        found = self.of(settings)
        return replace(
            found,
            compute=found.compute * self._ratio("compute", settings),
            exposed=found.exposed * self._ratio("exposed", settings),
            hbm=self.needed(settings),
        )

    def needed(self, settings: ShardingSettings) -> float:
        """The bytes of HBM of :meth:`corrected`."""
        state, working = self._memory(settings)
        return state + working * self._ratio("hbm", settings)

    def learn(
        self, settings: ShardingSettings, hbm: float, compute: float = 0.0, exposed: float = 0.0
    ) -> None:
        """Record the compiler's result for ``settings``; times are 0 if the step does not fit. The
        ratio of memory is that of the part that is not ``Estimate.state``."""
        found, kind = self.of(settings), _kind(settings)
        for name, measured, guessed in (
            ("compute", compute, found.compute),
            ("exposed", exposed, found.exposed),
            ("hbm", hbm - found.state, found.hbm - found.state),
        ):
            if measured > 0 and guessed > 0:
                ratios = self._ratios.setdefault(name, {})
                ratios.setdefault(kind, []).append(measured / guessed)

    def knows(self, settings: ShardingSettings) -> bool:
        """Whether a candidate that computes blocks in the same way was compiled."""
        return _kind(settings) in self._ratios.get("hbm", {})

    def _ratio(self, name: str, settings: ShardingSettings) -> float:
        known = self._ratios.get(name, {})
        ratios = known.get(_kind(settings)) or [one for some in known.values() for one in some]
        return sum(ratios) / len(ratios) if ratios else 1.0

    def _of(self, settings: ShardingSettings) -> Estimate:
        """The estimate for ``settings``."""
        facts, chip = self.facts(settings), self._where.chip
        shared = settings.shard_group_size or self._where.devices
        units = self._units(settings)
        state, working = self._memory(settings)
        forward, backward = (sum(unit.forward for unit in units), sum(u.backward for u in units))
        adding, exposed = self._waited(_travelling(units, settings), settings, shared)
        optimizer = 2 * facts.state / shared / chip.device_hbm_bandwidth
        compute = (forward + backward) * (1 + AHEAD * settings.scan_prefetch) + adding + optimizer
        # Copies to the host overlap with the forward, and those back with the backward.
        on_host = sum(unit.on_host for unit in units)
        one_way = on_host / chip.device_host_bandwidth
        exposed += max(0.0, one_way - forward) + max(0.0, one_way - backward)
        return Estimate(compute, exposed, state + working, state, on_host)

    def _memory_of(self, settings: ShardingSettings) -> tuple[float, float]:
        """Bytes of HBM: those that do not depend on how the model is computed, and the others."""
        units = self._units(settings)
        facts, shared = self.facts(settings), settings.shard_group_size or self._where.devices
        state = (facts.state + 4 * sum(unit.facts.trainable for unit in units)) / shared
        full = _full(_gathered(units, settings), settings)
        working = _activations(units) + _code(units, settings) + full
        return state + facts.inputs, working

    def routes_matter(self, settings: ShardingSettings) -> bool:
        """Whether another ``collective_routes`` changes the route of any collective."""
        if settings.shard_group_size not in (None, self._where.devices):
            return False  # only collectives over an entire slice have several routes
        wire, ranks = self.wire, self._where.devices
        return any(
            wire.gathering(unit.gathered, ranks, "auto")
            != wire.gathering(unit.gathered, ranks, "default")
            or wire.reducing(unit.reduced, ranks, "auto")
            != wire.reducing(unit.reduced, ranks, "default")
            for unit in _travelling(self._units(settings), settings)
        )

    def _units(self, settings: ShardingSettings) -> list[_Unit]:
        facts = self.facts(settings)
        rest = len(facts.units) - len(facts.blocks)
        return [_Unit(one, settings, number - rest) for number, one in enumerate(facts.units)]

    def _waited(
        self, units: Sequence[_Unit], settings: ShardingSettings, shared: int
    ) -> tuple[float, float]:
        """Seconds of compute for collectives, and seconds that compute waits for them."""
        routes = settings.collective_routes
        beside = self._where.chip.overlaps_gathers and (settings.scan_prefetch or not settings.scan)

        def gather(unit: _Unit, ranks: int = shared) -> float:
            return self.wire.gathering(unit.gathered, ranks, routes)

        adding, exposed, before = 0.0, 0.0, 0.0
        for unit in units:  # a gather overlaps with the compute of the unit before
            early = settings.forward_prefetch or settings.scan
            exposed += max(0.0, gather(unit) - (before if beside and early else 0.0))
            before = unit.forward
        before = 0.0
        for unit in reversed(units):
            if not unit.kept:
                early = settings.backward_prefetch == "pre" or settings.scan
                hidden = before if beside and early else 0.0
                ranks = unit.kept_among or shared
                exposed += max(0.0, gather(unit, min(ranks, shared)) - hidden)
            before = unit.backward
            reducing = self.wire.reducing(unit.reduced, shared, routes)
            exposed += self.wire.replicas(unit.full_gradient // shared, shared)
            hidden = before if settings.scan_prefetch or not settings.scan else 0.0
            exposed += reducing.waited + max(0.0, reducing.beside - hidden)
            adding += reducing.adding
        return adding, exposed


class _Unit:
    """One unit with given settings, in bytes and seconds. ``number``: among the blocks, from 0; the
    other units have negative ones."""

    def __init__(self, facts: UnitFacts, settings: ShardingSettings, number: int) -> None:
        self.facts = facts
        recompute = settings.recompute
        some = isinstance(recompute, int) and number < recompute
        self.recomputed = facts.is_block and (recompute == "all" or some)
        self.full = facts.elements * facts.itemsize
        self.full_gradient = facts.trainable * facts.itemsize
        self.gathered, self.reduced = facts.gathered, facts.reduced
        self.forward = facts.forward
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
        self.held = facts.held_recomputed if self.recomputed else facts.held
        self.on_host = self.held if self.recomputed and settings.offload else 0.0


def _gathered(units: list[_Unit], settings: ShardingSettings) -> list[list[_Unit]]:
    """The units that are gathered together."""
    if settings.units == "model":
        return [units]
    size = settings.blocks_per_unit
    rest = [[unit] for unit in units if not unit.facts.is_block]
    blocks = units[len(rest) :]
    return [*rest, *(blocks[n : n + size] for n in range(0, len(blocks), size))]


def _travelling(units: list[_Unit], settings: ShardingSettings) -> list[_Unit]:
    """Assign tensors to the collectives that send them.

    The small tensors of an FSDP unit are sent in one collective, before all others. Each large one
    is sent separately and overlaps with what computes before its use, even in the same FSDP unit.
    """
    for first, *others in _gathered(units, settings):
        for unit in others:
            first.gathered += small(unit.gathered)
            first.reduced += small(unit.reduced)
            unit.gathered, unit.reduced = large(unit.gathered), large(unit.reduced)
    return units


def _activations(units: Sequence[_Unit]) -> float:
    """The largest bytes of activations, at the end of the forward."""
    on_device = [unit.held for unit in units if not unit.on_host]
    on_device += [unit.spared for unit in units]
    # On the device at the same time: the input of the running block and that of the next.
    on_host = sorted((unit.on_host for unit in units if unit.on_host), reverse=True)[:2]
    again = max((unit.facts.held for unit in units if unit.recomputed), default=0.0)
    working = 2 * max(unit.facts.largest for unit in units)
    return sum(on_device) + sum(on_host) + again + working


def _full(gathered: Sequence[Sequence[_Unit]], settings: ShardingSettings) -> float:
    """The largest bytes of full parameters and full gradients at the same time."""
    early = settings.scan_prefetch if settings.scan else settings.forward_prefetch
    at_a_time = 2 if early else 1
    full = [(sum(unit.full for unit in one), one[0]) for one in gathered]
    passing = sorted((size for size, one in full if not one.kept), reverse=True)[:at_a_time]
    kept = sum(size for size, one in full if one.kept)
    kept += sum(size // one.kept_among for size, one in full if one.kept_among)
    gradients = sorted((sum(unit.full_gradient for unit in one) for one in gathered), reverse=True)
    few = gradients[:at_a_time] if settings.limit_all_gathers else gradients
    return sum(passing) + kept + sum(few)


def _code(units: Sequence[object], settings: ShardingSettings) -> float:
    return CODE_BYTES * (2 + 2 * settings.scan_prefetch if settings.scan else len(units))


def _kind(settings: ShardingSettings) -> tuple[str, bool]:
    how = "host" if settings.offload else str(settings.recompute)
    more = " kept" * bool(settings.keep) + " ahead" * settings.scan_prefetch
    return how + more, settings.scan
