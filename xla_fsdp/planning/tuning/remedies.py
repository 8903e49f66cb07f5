"""Changes with which a step that does not fit would fit, by the same estimates."""

from __future__ import annotations

from collections.abc import Iterator

from ...tpu.topology import Slice, names, resolve
from .estimate import Correction, Estimates
from .facts import StepFacts
from .settings import ShardingSettings, differences

GIB = 2**30


def describe_remedy(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, capacity: float
) -> str:
    """The one change with which ``settings`` would fit, and the memory it needs; "" if none."""
    found = _fitting(settings, estimates, correction, capacity)
    if found is None:
        return ""
    other, hbm = found
    return f"with {differences(other, settings)} it would need {hbm / GIB:.1f} GiB"


def with_remedy(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, capacity: float
) -> ShardingSettings | None:
    """``settings`` with the one change with which they would fit; ``None`` if there is none."""
    found = _fitting(settings, estimates, correction, capacity)
    return found[0] if found else None


def _fitting(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, capacity: float
) -> tuple[ShardingSettings, float] | None:
    for other in _changes(settings, bool(estimates.facts(settings).blocks)):
        hbm = correction.applied(other, estimates.memory(other)).hbm
        if hbm <= capacity:
            return other, hbm
    return None


def _changes(settings: ShardingSettings, blocks: bool) -> Iterator[ShardingSettings]:
    if blocks and (settings.units == "model" or settings.blocks_per_unit > 1):
        yield settings.changed(units="blocks", blocks_per_unit=1)
    if blocks and settings.recompute != "all":
        yield settings.changed(recompute="all")
    if settings.reshard_after_forward is not True or settings.kept_blocks:
        yield settings.changed(reshard_after_forward=True, kept_blocks=0)
    if settings.keep:
        yield settings.changed(keep=())
    if settings.shard_group_size is not None:
        yield settings.changed(shard_group_size=None)
    if blocks and not settings.offload:
        yield settings.changed(recompute="all", offload=True, units="blocks", kept_blocks=0)


def leanest(settings: ShardingSettings, facts: StepFacts) -> ShardingSettings:
    """``settings`` with every change that saves memory."""
    lean = settings.changed(
        reshard_after_forward=True, kept_blocks=0, keep=(), shard_group_size=None
    )
    if not facts.blocks:
        return lean
    return lean.changed(units="blocks", blocks_per_unit=1, recompute="all", offload=True)


def what_would_fit(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, where: Slice
) -> list[str]:
    """Advice where no candidate fits: a smaller batch or a larger slice, if one is enough.

    ``settings``: the batch, and the values that the caller fixed.
    """
    facts = estimates.facts(settings)
    lean = leanest(settings, facts)
    capacity = where.chip.device_usable_hbm_bytes()
    needed = correction.applied(lean, estimates.memory(lean)).hbm
    advice = [
        f"The least estimated memory is {needed / GIB:.1f} of {capacity / GIB:.1f} GiB a device "
        f"(with {lean})."
    ]
    smaller = (settings.batch or facts.batch) // 2
    while smaller >= 1 and settings.batch is not None:
        other = lean.changed(batch=smaller)
        hbm = correction.applied(other, estimates.memory(other)).hbm
        if hbm <= capacity:
            advice.append(f"A batch of {smaller} samples a device would need {hbm / GIB:.1f} GiB.")
            break
        smaller //= 2
    for slice_ in larger(where):
        other_estimates = Estimates({"blocks": facts, lean.units: facts}, slice_)
        hbm = correction.applied(lean, other_estimates.memory(lean)).hbm
        if hbm <= slice_.chip.device_usable_hbm_bytes():
            advice.append(
                f"{slice_.name}, with the same batch a device, would need {hbm / GIB:.1f} GiB: the "
                f"smallest {slice_.chip.family} slice that is large enough."
            )
            break
    else:
        advice.append(f"No {where.chip.family} slice is large enough for this batch a device.")
    return advice


def larger(where: Slice) -> Iterator[Slice]:
    """Named slices with more chips of the same kind, the smallest first."""
    for name in names():
        slice_ = resolve(name)
        if slice_.chip == where.chip and slice_.devices > where.devices:
            yield slice_
