"""How long a unit's parameters travel over a slice: the model of the links, without a program."""

from __future__ import annotations

from functools import lru_cache

from ...collectives.routes import Routes
from ...tpu.links import Links
from ...tpu.topology import Slice
from ...tpu.traffic import OneCollective, wire_bytes

# Families whose compiler runs all-gathers beside compute, and those on which large gradients go
# around rings beside compute. libtpu 0.0.21: docs/benchmarks.md, "asynchronous".
GATHERS_BESIDE = ("v5e", "v5p", "v6e")
REDUCES_BESIDE = ("v6e",)


class Wire:
    """Seconds of the collectives of a unit on ``where``."""

    def __init__(self, where: Slice) -> None:
        self._where = where
        self._links = Links(where)
        self._routes = {how: Routes(where, how) for how in ("modelled", "stages", "rings")}
        self.seconds = lru_cache(maxsize=None)(self._seconds)

    @property
    def gathers_beside(self) -> bool:
        """Whether gathers run beside compute."""
        return self._where.chip.family in GATHERS_BESIDE

    def routes_differ(self, size: int) -> dict[str, bool]:
        """By the name of a way to have collectives go, whether one of ``size`` bytes goes otherwise
        than as modelled."""
        if self._where.count > 1:
            return {}
        usual = self._routes["modelled"]
        scatter = usual.scatter(size).stages
        staged = len(usual.gather(size).stages) + len(scatter) > 2
        ringed = any(usual.rings(groups, size) is not None for groups in scatter)
        asked = self._routes["rings"]
        possible = any(asked.rings(g, size) is not None for g in asked.scatter(size).stages)
        return {"at_once": staged or ringed, "stages": ringed, "rings": possible and not ringed}

    def _seconds(self, kind: str, size: int, ranks: int, routes: str = "modelled") -> float:
        """Of one collective of ``size`` bytes, the larger of its ends, among each ``ranks``
        consecutive ranks; ``kind``: "all-gather", "reduce-scatter" or "all-reduce"."""
        devices = self._where.devices
        if ranks <= 1 or not size:
            return 0.0
        one = devices // self._where.count  # ranks of one slice
        if ranks > one:
            return self._between(kind, size, ranks // one) + self.seconds(kind, size, one)
        if ranks == one and self._where.count == 1 and kind != "all-reduce":
            if routes != "at_once":
                ways = self._routes[routes]
                route = ways.gather(size) if kind == "all-gather" else ways.scatter(size)
                return route.seconds
            return self._routes["modelled"].all(kind, size)[0].seconds
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
        chip = self._where.chip
        one = self._where.devices // self._where.count
        part = size if kind == "all-reduce" else size // one
        sent = wire_bytes(kind, part, slices) * chip.devices
        phases = 2 if kind == "all-reduce" else 1
        return chip.launch_latency + phases * chip.dcn_latency + sent / chip.dcn_bandwidth
