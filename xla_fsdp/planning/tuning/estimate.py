"""What a step takes and needs with given settings, by analysis: nothing is traced or compiled.

Time is compute and what of the collectives nothing hides.

* Compute of a unit: its forward once, its backward twice that (``program/flops.py`` has the
  source), and its forward again if it is recomputed. The optimizer reads and writes its state once
  at the bandwidth of HBM.
* Parameters are gathered for the forward, again for the backward unless they are kept, and
  gradients are reduced. Where the compiler gathers beside compute, the gather of a unit is hidden
  by the compute of the unit before it, as far as that is longer; all else waits.
* The tensors of a unit travel in several collectives, see ``sharding/comm_plan.py``. Each large one
  has a collective of its own, whose route over the links depends on its bytes.

Memory is the state of the optimizer and gradients, cut by the ranks that share; what the forward
leaves for the backward; full parameters and gradients of the units that have any at a time; and
what one unit works with. All figures are of one device. They rank candidates: the compiler has the
last word, and :class:`Correction` learns from what it said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ...collectives.routes import Route, Routes
from ...sharding.comm_plan import SMALL_BYTES
from ...sharding.layout import LANES
from ...tpu.links import Links
from ...tpu.topology import Slice
from ...tpu.traffic import OneCollective
from ..tracing.units import OnWire
from .facts import StepFacts, UnitFacts
from .kept import keeps
from .settings import ShardingSettings

# Of the executable, for every block that is compiled by itself: 50 MiB for four blocks of workload
# S on v3-8, 393 for 32 (docs/how-to/scan-layers.md).
CODE_BYTES = 12 << 20
# Of compute, that a loop takes longer which gathers ahead. The mean of two plans that differ in
# nothing else, and far apart: 10 % more of GPT-3 13B on v5litepod-64, 5 % less of ViT-10B on
# v5litepod-256 (docs/design/benchmarks.md).
AHEAD = 0.03


class Reducing(NamedTuple):
    """Seconds of the reductions of a unit: ``waited`` for, ``beside`` compute, around rings, and
    ``adding`` up there what came, which a chip does itself: it reads two values and writes one."""

    waited: float
    beside: float
    adding: float


def collectives(tensors: Iterable[OnWire]) -> tuple[OnWire, ...]:
    """What of ``tensors`` travels together: the small ones, and each other by itself."""
    tensors = tuple(tensors)
    size = sum(one.bytes for one in small(tensors))
    together = (OnWire(size, max(size // (2 * LANES), 1)),) if size else ()  # of 16 bits
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
        # Asked for every block of every candidate, and blocks are alike.
        self.gathering = lru_cache(maxsize=None)(self._gathering)
        self.reducing = lru_cache(maxsize=None)(self._reducing)

    @property
    def gathers_beside(self) -> bool:
        """Whether gathers run beside compute."""
        return self._where.chip.overlaps_gathers

    def _gathering(self, tensors: tuple[OnWire, ...], ranks: int, routes: str) -> float:
        """Seconds of the gathers of ``tensors`` among each ``ranks`` consecutive ranks."""
        sent = collectives(tensors)
        return sum(self.seconds("all-gather", one.bytes, ranks, routes) for one in sent)

    def _reducing(self, tensors: tuple[OnWire, ...], ranks: int, routes: str) -> Reducing:
        waited = beside = adding = 0.0
        for one in collectives(tensors):
            seconds = self.seconds("reduce-scatter", one.bytes, ranks, routes)
            if ranks == self._where.devices and self._rings(one, routes):
                beside += seconds
                adding += 3 * one.bytes / self._where.chip.device_hbm_bandwidth
            else:
                waited += seconds
        return Reducing(waited, beside, adding)

    def differs(self, gathered: Iterable[OnWire], reduced: Iterable[OnWire]) -> bool:
        """Whether a collective over the whole slice, of those that gather or reduce these tensors,
        goes another way with ``"auto"`` than with ``"default"``."""
        return self._where.count == 1 and (
            any(
                not self._is_default(self._routes.gather(one.bytes))
                for one in collectives(gathered)
            )
            or any(not self._is_default(self._reduction(one)) for one in collectives(reduced))
        )

    def _reduction(self, one: OnWire) -> Route:
        return self._routes.reduction(one.bytes, one.rows)

    def _rings(self, one: OnWire, routes: str) -> bool:
        return routes != "default" and self._where.count == 1 and self._reduction(one).overlaps

    def _is_default(self, route: Route) -> bool:
        """Whether the compiler does all of it with one set of ranks."""
        return route.stages == ((tuple(range(self._where.devices)),),) and not route.overlaps

    def _seconds(self, kind: str, size: int, ranks: int, routes: str = "auto") -> float:
        """Of one collective of ``size`` bytes, the larger of its ends, among each ``ranks``
        consecutive ranks; ``kind``: "all-gather", "reduce-scatter" or "all-reduce"."""
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
        """Of the sum of ``size`` bytes over the copies that each ``ranks`` consecutive ranks make
        one of."""
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
        """Over the data-centre network: each device its part, as in docs/design/time-model.md."""
        one = self._where.devices // self._where.count
        part = size if kind == "all-reduce" else size // one
        group = tuple(range(slices))
        return self._links.seconds(OneCollective(kind, part, (group,), across_slices=True))


@dataclass(frozen=True)
class Estimate:
    """Of one step on one device. ``seconds`` = ``compute`` + ``exposed``; ``hbm``, ``host``: bytes.

    ``state``: of ``hbm``, what does not depend on how the model is computed.
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
        facts: by ``ShardingSettings.units``; that of ``"blocks"`` serves for ``"model"`` too.
    """

    def __init__(self, facts: dict[str | int, StepFacts], where: Slice) -> None:
        self._facts = facts
        self._where = where

    @cached_property
    def wire(self) -> Wire:
        """The slice's links."""
        return Wire(self._where)

    def facts(self, settings: ShardingSettings) -> StepFacts:
        """Of the model with these settings' units and batch."""
        key = "blocks" if settings.units == "model" else settings.units
        found = self._facts[key]
        return found if settings.batch is None else found.scaled(settings.batch)

    def of(self, settings: ShardingSettings) -> Estimate:
        """The estimate for ``settings``."""
        facts, shared = self.facts(settings), settings.shard_group_size or self._where.devices
        units = _units(facts, settings)
        compute = sum(unit.compute for unit in units) * (1 + AHEAD * settings.scan_prefetch)
        adding, exposed = self._waited(_travelling(units, settings), settings, shared)
        compute += adding + self._optimizer(facts, shared)
        return replace(self.memory(settings), compute=compute, exposed=exposed)

    def goes_otherwise(self, settings: ShardingSettings) -> bool:
        """Whether any collective takes another way with another ``collective_routes``."""
        if settings.shard_group_size not in (None, self._where.devices):
            return False  # only collectives over a whole slice have a choice
        units = _travelling(_units(self.facts(settings), settings), settings)
        return any(self.wire.differs(unit.gathered, unit.reduced) for unit in units)

    def memory(self, settings: ShardingSettings) -> Estimate:
        """The memory alone; its times are 0."""
        facts, shared = self.facts(settings), settings.shard_group_size or self._where.devices
        units = _units(facts, settings)
        gathered = _gathered(units, settings)
        state = (facts.state + 4 * sum(u.trainable for u in facts.units)) / shared
        state += facts.inputs
        hbm = state + _activations(units) + _full(gathered, settings) + _code(units, settings)
        return Estimate(0.0, 0.0, hbm, state, sum(unit.on_host for unit in units))

    def _optimizer(self, facts: StepFacts, shared: int) -> float:
        return 2 * facts.state / shared / self._where.chip.device_hbm_bandwidth

    def _waited(
        self, units: Sequence[_Unit], settings: ShardingSettings, shared: int
    ) -> tuple[float, float]:
        """Seconds that collectives make a chip compute, and wait."""
        routes = settings.collective_routes
        beside = self.wire.gathers_beside and (settings.scan_prefetch or not settings.scan)

        def gather(unit: _Unit, ranks: int = shared) -> float:
            return self.wire.gathering(unit.gathered, ranks, routes)

        adding, exposed, before = 0.0, 0.0, 0.0
        for unit in units:  # what computes while it is gathered: the unit before
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


@dataclass
class _Unit:
    """One unit as settings have it. Bytes and seconds."""

    facts: UnitFacts
    step: StepFacts
    settings: ShardingSettings
    number: int

    def __post_init__(self) -> None:
        facts, settings = self.facts, self.settings
        number = self.number - (len(self.step.units) - len(self.step.blocks))  # among the blocks
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
        # The root keeps its own parameters: its backward follows at once.
        chosen = keeps(settings.kept_blocks, number, facts.name)
        root = settings.units == "model" or not facts.is_block
        self.kept = reshard is False or root or chosen
        self.kept_among = 0 if isinstance(reshard, bool) or self.kept else reshard
        self.held = facts.held_recomputed if self.recomputed else facts.held
        self.on_host = self.held if self.recomputed and settings.offload else 0.0

    @property
    def compute(self) -> float:
        return self.forward + self.backward


def _units(facts: StepFacts, settings: ShardingSettings) -> list[_Unit]:
    return [_Unit(one, facts, settings, number) for number, one in enumerate(facts.units)]


def _gathered(units: list[_Unit], settings: ShardingSettings) -> list[list[_Unit]]:
    """What is gathered together."""
    if settings.units == "model":
        return [units]
    size = settings.blocks_per_unit
    rest = [[unit] for unit in units if not unit.facts.is_block]
    blocks = units[len(rest) :]
    return [*rest, *(blocks[n : n + size] for n in range(0, len(blocks), size))]


def _travelling(units: list[_Unit], settings: ShardingSettings) -> list[_Unit]:
    """As tensors are on their way: large ones each by itself, and hidden by what computes before
    they are used, be it of the same unit; the small ones of a unit together, before all others."""
    for first, *others in _gathered(units, settings):
        for unit in others:
            first.gathered += small(unit.gathered)
            first.reduced += small(unit.reduced)
            unit.gathered, unit.reduced = large(unit.gathered), large(unit.reduced)
    return units


def _activations(units: Sequence[_Unit]) -> float:
    """Most bytes of activations at a time, at the turn from forward to backward."""
    on_device = [unit.held for unit in units if not unit.on_host]
    on_device += [unit.spared for unit in units]
    # One waits for the backward of the block that runs, one for that of the next.
    on_host = sorted((unit.on_host for unit in units if unit.on_host), reverse=True)[:2]
    again = max((unit.facts.held for unit in units if unit.recomputed), default=0.0)
    working = 2 * max(unit.facts.largest for unit in units)
    return sum(on_device) + sum(on_host) + again + working


def _full(gathered: Sequence[Sequence[_Unit]], settings: ShardingSettings) -> float:
    """Most bytes of full parameters and full gradients at a time."""
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


class Correction:
    """What the compiler said so far, over what was estimated.

    Ratios by how blocks are computed (recomputed or not, in a loop or not), since in that they
    differ; one that nothing is known of yet goes by the mean of the others. Memory: of what is not
    ``Estimate.state``.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[tuple[str, bool], list[float]]] = {}

    def learn(self, settings: ShardingSettings, found: Estimate, measured: Estimate) -> None:
        """``measured``: by the compiler, of what ``found`` was estimated."""
        pairs = {
            "compute": (measured.compute, found.compute),
            "exposed": (measured.exposed, found.exposed),
            "hbm": (measured.hbm - found.state, found.hbm - found.state),
        }
        for name, (said, guessed) in pairs.items():
            if said > 0 and guessed > 0:
                ratios = self._known.setdefault(name, {})
                ratios.setdefault(_kind(settings), []).append(said / guessed)

    def learn_memory(self, settings: ShardingSettings, found: Estimate, hbm: float) -> None:
        """``hbm``: bytes that the compiler said it would take, of a step that does not fit."""
        if hbm > found.state and found.hbm > found.state:
            ratios = self._known.setdefault("hbm", {})
            ratio = (hbm - found.state) / (found.hbm - found.state)
            ratios.setdefault(_kind(settings), []).append(ratio)

    def applied(self, settings: ShardingSettings, found: Estimate) -> Estimate:
        """``found`` with the ratios that are known."""
        working = found.hbm - found.state
        return replace(
            found,
            compute=found.compute * self._ratio("compute", settings),
            exposed=found.exposed * self._ratio("exposed", settings),
            hbm=found.state + working * self._ratio("hbm", settings),
        )

    def knows(self, settings: ShardingSettings) -> bool:
        """Whether the compiler has seen blocks computed like these."""
        return _kind(settings) in self._known.get("hbm", {})

    def _ratio(self, name: str, settings: ShardingSettings) -> float:
        known = self._known.get(name, {})
        ratios = known.get(_kind(settings)) or [one for some in known.values() for one in some]
        return sum(ratios) / len(ratios) if ratios else 1.0


def _kind(settings: ShardingSettings) -> tuple[str, bool]:
    how = "host" if settings.offload else str(settings.recompute)
    more = " kept" * bool(settings.keep) + " ahead" * settings.scan_prefetch
    return how + more, settings.scan
