"""The candidates of a search."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from typing import Any

from ...collectives.routes import COLLECTIVE_ROUTES
from ...deprecated import rename_keys
from ...tpu.topology import Slice
from .estimate import Estimates
from .facts import StepFacts
from .settings import PREFETCHES, ShardingSettings, changes, require_allowed

# Estimates model MAIN well: all combinations are candidates. FINE are tried one by one on the best.
MAIN = (
    "batch", "units", "scan", "reshard_after_forward", "kept_blocks", "recompute", "keep",
    "offload", "shard_group_size", "scan_prefetch",
)  # fmt: skip
FINE = (
    "collective_routes", "scoped_vmem_kib", "forward_prefetch", "backward_prefetch",
    "limit_all_gathers",
)  # fmt: skip

# More blocks are extrapolated from programs with DEPTHS of them. With fewer these take as long as
# one program of all: 2 blocks of ViT-L/16 546 s, 24 889.
MANY_BLOCKS, DEPTHS = 24, (2, 4)

Values = Mapping[str, Sequence[Any]]


def checked_search(search: Mapping[str, Collection[Any]] | None) -> dict[str, tuple[Any, ...]]:
    """Check the ``search`` argument of ``tune``; raises ValueError or TypeError."""
    if search is not None and not isinstance(search, Mapping):
        raise TypeError(
            "search must have lists of values by the name of a setting, such as "
            f"{{'scan': [True]}}; got {search!r:.80}"
        )
    checked: dict[str, tuple[Any, ...]] = {}
    names = [one.name for one in fields(ShardingSettings)]
    for name, values in rename_keys("ShardingSettings", search or {}).items():
        if name not in names:
            raise ValueError(
                f"search has {name!r}, which is no setting; allowed are {', '.join(names)}"
            )
        if isinstance(values, str) or not isinstance(values, Collection):
            raise TypeError(
                f"search[{name!r}] must be a list of values to try (one value fixes the setting); "
                f"got {values!r}"
            )
        if not values:
            raise ValueError(f"search[{name!r}] is empty: give at least one value")
        for value in values:
            require_allowed(name, value)
        checked[name] = tuple(dict.fromkeys(values))
    return checked


@dataclass(frozen=True)
class Space:
    """``values``: those to try of each setting, the default first. ``chooses_keep``: whether
    ``search.py`` chooses values of ``keep``.
    """

    values: Values
    chooses_keep: bool = True

    @classmethod
    def of(
        cls,
        facts: StepFacts,
        where: Slice,
        batches: Sequence[int | None],
        scans: bool,
        search: Values,
    ) -> Space:
        """``scans``: whether blocks can run in one loop. ``search``: values that replace the usual
        ones.
        """
        blocks, together = len(facts.blocks), neighbour_group_sizes(where)
        half = [blocks // 2] if blocks >= 4 else []
        vmem = where.chip.scoped_vmem_kib
        values: dict[str, Sequence[Any]] = {
            "batch": batches,
            "units": ("blocks", "model") if blocks else ("model",),
            "scan": (False, True) if scans else (False,),
            "reshard_after_forward": (True, False, *together),
            "kept_blocks": (0,),
            "recompute": ("none", *half, "all") if blocks else ("none",),
            "keep": ((),),
            "offload": (False, True) if blocks else (False,),
            "shard_group_size": (None, *together),
            "scan_prefetch": (False, True) if where.chip.overlaps_gathers else (False,),
            "forward_prefetch": (True,),
            "backward_prefetch": PREFETCHES[:1],
            "limit_all_gathers": (True,),
            "collective_routes": COLLECTIVE_ROUTES,
            "scoped_vmem_kib": (None, *([vmem] if vmem else [])),
        }
        return cls({**values, **search}, "keep" not in search)

    def main(self) -> list[ShardingSettings]:
        """All possible combinations of the main settings, those closest to the defaults first.

        Raises ValueError if there are none.
        """
        fixed = {name: self.values[name][0] for name in FINE}
        found, why = [], "with the others, one of its settings has no effect"
        for combination in product(*(self.values[name] for name in MAIN)):
            chosen = dict(zip(MAIN, combination, strict=True))
            if _pointless(chosen):
                continue
            try:
                found.append(ShardingSettings(**{**fixed, **chosen}))
            except ValueError as error:
                why = str(error)
        if not found:
            raise ValueError(
                f"search leaves no candidate ({why}): give more values, or leave a setting out"
            )
        return sorted(found, key=plainness)

    def is_main(self, settings: ShardingSettings) -> bool:
        return all(getattr(settings, name) == self.values[name][0] for name in FINE)

    def around(self, best: ShardingSettings, estimates: Estimates) -> list[ShardingSettings]:
        """``best`` with one of the FINE settings changed, if that changes the program."""
        found = []
        for name in FINE:
            for value in self.values[name]:
                other = best.changed(**{name: value})
                differs = name != "collective_routes" or estimates.routes_matter(other)
                if other != best and differs:
                    found.append(other)
        return found


def neighbour_group_sizes(where: Slice) -> tuple[int, ...]:
    """Sizes of groups of neighbours: on one host, in a row or plane of chips, on one slice."""
    x, y, _, cores = where.device_shape
    one = where.devices // where.count
    sizes = {prod(where.chips_per_host) * cores, x * cores, x * y * cores, one}
    return tuple(sorted(size for size in sizes if 1 < size < where.devices))


def main_of(settings: ShardingSettings) -> ShardingSettings:
    usual = ShardingSettings()
    return settings.changed(**{name: getattr(usual, name) for name in FINE})


def plainness(settings: ShardingSettings) -> int:
    """How many settings differ from the defaults; the batch does not count."""
    return len(changes(settings, ShardingSettings(batch=settings.batch)))


def _pointless(chosen: Mapping[str, Any]) -> bool:
    """Whether the combination gives the same program as another one, or is never better."""
    reshard, shared = chosen["reshard_after_forward"], chosen["shard_group_size"]
    if chosen["kept_blocks"] and reshard is not True:
        return True  # two ways to keep parameters
    if chosen["units"] == "model" and reshard is not True:
        return True  # the root always keeps its parameters
    return not isinstance(reshard, bool) and shared is not None and reshard >= shared
