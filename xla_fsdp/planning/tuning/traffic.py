"""How long a unit's parameters travel over a slice: the model of the links, without a program.

What a unit has travels in several collectives, see ``sharding/wire.py``: its large tensors each by
itself, and over which ways of the links depends on the bytes of that one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ...collectives.rings import Rings
from ...collectives.routes import Routes, reduction_stages
from ...sharding.layout import LANES
from ...sharding.wire import BESIDE_BYTES, SMALL_BYTES
from ...tpu.links import Links
from ...tpu.topology import Slice
from ...tpu.traffic import Groups, OneCollective
from ..tracing.units import OnWire

# What a collective is made of, stage by stage: who takes part, and rings that it goes around.
_Way = list[tuple[Groups, Rings | None]]


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
            any(self._gather(one) != self._at_once for one in collectives(gathered))
            or any(self._reduce(one, "auto") != self._at_once for one in collectives(reduced))
        )

    def _gather(self, one: OnWire) -> _Way:
        return [(groups, None) for groups in self._routes.gather(one.bytes).stages]

    def _reduce(self, one: OnWire, routes: str) -> _Way:
        if routes == "default":
            return self._at_once
        beside = one.bytes > BESIDE_BYTES
        return reduction_stages(self._routes, one.bytes, one.rows, beside)

    def _rings(self, one: OnWire, routes: str) -> bool:
        return self._where.count == 1 and any(rings for _, rings in self._reduce(one, routes))

    @property
    def _at_once(self) -> _Way:
        return [((tuple(range(self._where.devices)),), None)]

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
        """Over the data-centre network: each device its part, as in docs/plan-time-model.md."""
        one = self._where.devices // self._where.count
        part = size if kind == "all-reduce" else size // one
        group = tuple(range(slices))
        return self._links.seconds(OneCollective(kind, part, (group,), across_slices=True))
