"""What is kept for the backward, one by one, as long as there is room.

* Units, their full parameters: ZeRO-2 or ZeRO-3 unit by unit. One that is kept saves its second
  gather, or what of that nothing hides. Where gathers run beside compute that may be the last unit
  alone: before its backward there is none of another to hide its gather behind.
* Values of blocks in a loop, which else are computed again.

What saves most for a byte comes first; of equals the last, whose backward comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .estimate import Estimate
from .facts import StepFacts
from .settings import ShardingSettings


def worth_keeping(
    settings: ShardingSettings,
    facts: StepFacts,
    estimate: Callable[[ShardingSettings], Estimate],
    capacity: float,
) -> ShardingSettings:
    """``settings``, which keep nothing of it, with what pays; themselves if nothing does.

    ``facts``: of the model with these settings. ``capacity``: bytes of HBM that there are.
    """
    if settings.keep or settings.kept_blocks or settings.units == "model" or not facts.blocks:
        return settings
    if settings.scan_prefetch:
        # Caution, not known: both loops that were planned with both took longer, but other settings
        # changed with them (ViT-10B on v5litepod-256, LLaMA 8B on v6e-64: benchmarks/LOG.md).
        return settings
    if settings.scan:
        values = [one.name for one in facts.blocks[0].again]
        return _best(
            settings, len(values), estimate, capacity,
            lambda chosen: settings.changed(keep=tuple(values[n] for n in chosen)),
        )  # fmt: skip
    if settings.reshard_after_forward is not True:
        return settings
    units = _units(settings, facts)

    def kept(chosen: Sequence[int]) -> ShardingSettings:
        if len(chosen) == len(units):
            return settings.changed(reshard_after_forward=False)
        return settings.changed(kept_blocks=tuple(name for n in chosen for name in units[n]))

    return _best(settings, len(units), estimate, capacity, kept)


def _best(
    settings: ShardingSettings,
    count: int,
    estimate: Callable[[ShardingSettings], Estimate],
    capacity: float,
    keeping: Callable[[Sequence[int]], ShardingSettings],
) -> ShardingSettings:
    """``keeping`` some of ``count`` things, by their numbers in order."""
    plain = estimate(settings)
    worth = []
    for number in range(count):
        one = estimate(keeping([number]))
        saved = plain.seconds - one.seconds
        if saved > 0:
            worth.append((saved / max(one.hbm - plain.hbm, 1.0), number))
    chosen: list[int] = []
    for _, number in sorted(worth, reverse=True):
        more = sorted([*chosen, number])
        if estimate(keeping(more)).hbm <= capacity:
            chosen = more
    return keeping(chosen) if chosen else settings


def _units(settings: ShardingSettings, facts: StepFacts) -> list[tuple[int | str, ...]]:
    """What ``kept_blocks`` calls each unit but the outermost, which keeps its parameters anyway."""
    if settings.units != "blocks":
        return [(unit.name,) for unit in facts.blocks]
    count, size = len(facts.blocks), settings.blocks_per_unit
    return [tuple(range(first, min(first + size, count))) for first in range(0, count, size)]
