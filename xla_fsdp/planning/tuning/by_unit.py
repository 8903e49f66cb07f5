"""ZeRO-2 or ZeRO-3, unit by unit: which units keep their parameters for the backward.

A unit that does saves its second gather, or what of that nothing hides, for the bytes of its full
parameters. Those that save most for a byte come first, as long as there is room; of equals the
last, whose backward comes first. Where gathers run beside compute that may be the last unit alone:
before its backward there is none of another to hide its gather behind.
"""

from __future__ import annotations

from collections.abc import Callable

from .estimate import Estimate
from .facts import StepFacts
from .settings import ShardingSettings


def kept_where_it_pays(
    settings: ShardingSettings,
    facts: StepFacts,
    estimate: Callable[[ShardingSettings], Estimate],
    capacity: float,
) -> ShardingSettings:
    """``settings``, which keep none, with the units that pay for it; themselves if none does.

    ``facts``: of the model with these settings. ``capacity``: bytes of HBM that there are.
    """
    if settings.scan or settings.units == "model" or settings.reshard_after_forward is not True:
        return settings
    units = _units(settings, facts)
    plain = estimate(settings)
    worth: list[tuple[float, int]] = []
    for number, unit in enumerate(units):
        one = estimate(settings.changed(kept_blocks=unit))
        saved, bytes_ = plain.exposed - one.exposed, max(one.hbm - plain.hbm, 1.0)
        if saved > 0:
            worth.append((saved / bytes_, number))
    kept: list[int] = []
    for _, number in sorted(worth, reverse=True):
        if estimate(_keeping(settings, units, [*kept, number])).hbm <= capacity:
            kept.append(number)
    if len(kept) == len(units):
        return settings.changed(reshard_after_forward=False)
    return _keeping(settings, units, kept) if kept else settings


def _units(settings: ShardingSettings, facts: StepFacts) -> list[tuple[int | str, ...]]:
    """What ``kept_blocks`` calls each unit but the outermost, which keeps its parameters anyway."""
    if settings.units != "blocks":
        return [(unit.name,) for unit in facts.blocks]
    count, size = len(facts.blocks), settings.blocks_per_unit
    return [tuple(range(first, min(first + size, count))) for first in range(0, count, size)]


def _keeping(
    settings: ShardingSettings, units: list[tuple[int | str, ...]], chosen: list[int]
) -> ShardingSettings:
    return settings.changed(
        kept_blocks=tuple(name for number in sorted(chosen) for name in units[number])
    )
