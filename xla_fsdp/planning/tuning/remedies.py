"""What would make a step fit that does not, by the same estimates."""

from __future__ import annotations

from collections.abc import Iterator

from ...tpu.topology import Slice, names, resolve
from .estimate import Correction, Estimates
from .facts import StepFacts
from .settings import ShardingSettings

GIB = 2**30


def would_give(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, capacity: float
) -> str:
    """The one change that would make ``settings`` fit, and what it would give; "" if none would."""
    found = _fitting(settings, estimates, correction, capacity)
    return f"{found[0]} would give {found[2] / GIB:.1f}" if found else ""


def remedied(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, capacity: float
) -> ShardingSettings | None:
    """``settings`` with the one change that would make them fit, if one would."""
    found = _fitting(settings, estimates, correction, capacity)
    return found[1] if found else None


def _fitting(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, capacity: float
) -> tuple[str, ShardingSettings, float] | None:
    for what, other in _changes(settings, bool(estimates.facts(settings).blocks)):
        hbm = correction.applied(other, estimates.memory(other)).hbm
        if hbm <= capacity:
            return what, other, hbm
    return None


def _changes(settings: ShardingSettings, blocks: bool) -> Iterator[tuple[str, ShardingSettings]]:
    if blocks and (settings.units == "model" or settings.blocks_per_unit > 1):
        yield "a unit a block", settings.changed(units="blocks", blocks_per_unit=1)
    if blocks and settings.recompute != "all":
        yield "recomputing every block", settings.changed(recompute="all")
    if settings.reshard_after_forward is not True or settings.kept_blocks:
        other = settings.changed(reshard_after_forward=True, kept_blocks=0)
        yield "gathering again for the backward", other
    if settings.keep:
        yield "computing again what is kept", settings.changed(keep=())
    if settings.shard_group_size is not None:
        yield "sharding over all ranks", settings.changed(shard_group_size=None)
    if blocks and not settings.offload:
        other = settings.changed(recompute="all", offload=True, units="blocks", kept_blocks=0)
        yield "inputs of recomputed blocks on the host", other


def leanest(settings: ShardingSettings, facts: StepFacts) -> ShardingSettings:
    """``settings`` with all that saves memory."""
    lean = settings.changed(
        reshard_after_forward=True, kept_blocks=0, keep=(), shard_group_size=None
    )
    if not facts.blocks:
        return lean
    return lean.changed(units="blocks", blocks_per_unit=1, recompute="all", offload=True)


def what_would_fit(
    settings: ShardingSettings, estimates: Estimates, correction: Correction, where: Slice
) -> list[str]:
    """For a model of which nothing fits: a smaller batch, a larger slice, or that none would do.

    ``settings``: of which the batch is taken, and all that the caller fixed.
    """
    facts = estimates.facts(settings)
    lean = leanest(settings, facts)
    capacity = where.chip.device_usable_hbm_bytes()
    needed = correction.applied(lean, estimates.memory(lean)).hbm
    advice = [
        f"The least by the model is {needed / GIB:.1f} of {capacity / GIB:.1f} GiB a device "
        f"({lean})."
    ]
    smaller = (settings.batch or facts.batch) // 2
    while smaller >= 1 and settings.batch is not None:
        other = lean.changed(batch=smaller)
        hbm = correction.applied(other, estimates.memory(other)).hbm
        if hbm <= capacity:
            advice.append(f"A batch of {smaller} a device would need {hbm / GIB:.1f} GiB.")
            break
        smaller //= 2
    for slice_ in larger(where):
        other_estimates = Estimates({"blocks": facts, lean.units: facts}, slice_)
        hbm = correction.applied(lean, other_estimates.memory(lean)).hbm
        if hbm <= slice_.chip.device_usable_hbm_bytes():
            advice.append(
                f"{slice_.name}, with the same batch a device, would need {hbm / GIB:.1f} GiB: the "
                f"smallest {slice_.chip.family} slice that would do."
            )
            break
    else:
        advice.append(f"No {where.chip.family} slice is large enough for this batch a device.")
    return advice


def larger(where: Slice) -> Iterator[Slice]:
    """Named slices of the same chips with more of them, the smallest first."""
    for name in names():
        slice_ = resolve(name)
        if slice_.chip == where.chip and slice_.devices > where.devices:
            yield slice_
