"""What to change in a step: options with the time that they save, by the model of the plan.

Each rule changes the schedule as the option would, and times it again. A rule gives nothing where
the option is set already, where it saves less than 1 % of the step, or where memory does not
suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..records import Collective, CompilerMemory, Schedule, Timing
from ..tracing.units import TracedUnit
from .amounts import GIB
from .tables import TINY

_MOST = 5
_LEAST_SHARE = 0.01  # of the step
# Of free HBM that a suggestion may use, since its need is an estimate.
_USABLE = 0.9


@dataclass(frozen=True)
class Situation:
    """What is known of a planned step.

    Attributes:
        capacity: bytes of HBM that a step may take on one device.
        refused: whether the compiler refused the step, because it does not fit.
        retime: the time of a step with another schedule.
        options: names of compiler options that are set.
        scoped_vmem_kib: the limit for large matmuls on this chip; ``None`` if there is none.
    """

    schedule: Schedule
    timing: Timing
    memory: CompilerMemory
    capacity: int
    refused: bool
    units: Sequence[TracedUnit]
    retime: Callable[[Schedule], float]
    options: frozenset[str] = frozenset()
    scoped_vmem_kib: int | None = None

    @property
    def fits(self) -> bool:
        return not self.refused and self.memory.required <= self.capacity

    @property
    def free(self) -> float:
        """Bytes of HBM that a suggestion may use."""
        return _USABLE * (self.capacity - self.memory.required)


@dataclass(frozen=True)
class Suggestion:
    """``seconds``: what it saves of a step; ``None`` if that cannot be modelled."""

    seconds: float | None
    text: str


def suggestions(found: Situation) -> list[str]:
    """At most five things to change, those that save most first."""
    if not found.fits:
        return [one.text for one in _to_fit(found)][:_MOST]
    if not found.timing.step:
        return []  # nothing is known of its time
    several = [one for rule in _RULES for one in rule(found)]
    least = _LEAST_SHARE * found.timing.step
    worth = [one for one in several if one.seconds is None or one.seconds >= least]
    worth.sort(key=lambda one: one.seconds or 0.0, reverse=True)  # unknown gains last
    return [_said(one, found.timing.step) for one in worth][:_MOST]


def _said(one: Suggestion, step: float) -> str:
    if one.seconds is None:
        return f"{one.text}; the gain is not modelled, plan it"
    share = 100 * one.seconds / step
    return f"{one.text}: {1e3 * one.seconds:,.2f} ms less of a step, {share:.0f} % (model)"


# Rules for steps that fit.


def _without_recomputation(found: Situation) -> Iterator[Suggestion]:
    """Recomputation off, or for fewer modules if memory does not suffice for all."""
    again = {op.index: op for op in found.schedule.ops if op.recomputed}
    if not again:
        return
    ops = tuple(op for op in found.schedule.ops if not op.recomputed)
    saved = found.timing.step - found.retime(replace(found.schedule, ops=ops))
    needed = sum(
        one.bytes * again[one.born].times for one in found.schedule.buffers if one.born in again
    )
    share = min(1.0, found.free / needed) if needed else 1.0
    if share < 0.05:
        return
    looped = any(op.times > 1 for op in again.values())
    if share == 1.0:
        how = "no checkpoint_module" + (", and no scan_blocks" if looped else "")
    elif looped:
        how = "scan_blocks(keep=...) with more values"
    else:
        how = f"checkpoint_module on {100 * (1 - share):.0f} % of the modules that have it now"
    size = f"at most {share * needed / GIB:.1f} GiB more HBM"
    yield Suggestion(share * saved, f"{how} ({size})")


def _zero_2(found: Situation) -> Iterator[Suggestion]:
    """No second gather, if full parameters of all units fit."""
    gathers = [
        one for one in found.schedule.collectives
        if one.kind == "all-gather" and one.phase == "backward" and one.times == 1
    ]  # fmt: skip
    inner = [unit for unit in found.units if unit.name]
    needed = sum(one.bytes for unit in inner for one in unit.gathered)
    if gathers and inner and needed <= found.free:
        saved = found.timing.step - found.retime(_without(found.schedule, gathers))
        how = "reshard_after_forward=False (ZeRO-2)"
        yield Suggestion(saved, f"{how} ({needed / GIB:.1f} GiB more HBM)")


def _larger_batch(found: Situation) -> Iterator[Suggestion]:
    """Twice the samples, by what of the step does not grow with them."""
    memory = found.memory
    if not found.timing.model_flops or memory.temporaries > found.free:
        return
    ops = tuple(
        op if op.phase == "optimizer" else replace(op, cycles=2 * op.cycles)
        for op in found.schedule.ops
    )
    copies = tuple(replace(one, bytes=2 * one.bytes) for one in found.schedule.host_copies)
    twice = found.retime(replace(found.schedule, ops=ops, host_copies=copies))
    size = f"at most {memory.temporaries / GIB:.1f} GiB more HBM; compared by the sample"
    yield Suggestion(found.timing.step - twice / 2, f"twice the batch of a device ({size})")


def _bfloat16(found: Situation) -> Iterator[Suggestion]:
    """Half the bytes on the links."""
    if not found.units or any(unit.itemsize < 4 for unit in found.units):
        return
    halved = tuple(
        replace(one, bytes=one.bytes // 2, wire_bytes=one.wire_bytes // 2)
        if one.dtype == "f32" else one
        for one in found.schedule.collectives
    )  # fmt: skip
    saved = found.timing.step - found.retime(replace(found.schedule, collectives=halved))
    yield Suggestion(saved, "compute_dtype=torch.bfloat16 (counted: bytes sent; not: HBM traffic)")


def _larger_units(found: Situation) -> Iterator[Suggestion]:
    """Small synchronous collectives cost their latency."""
    small = [c for c in found.schedule.collectives if c.bytes < TINY and not c.asynchronous]
    if len(found.units) > 2 and small:
        saved = found.timing.step - found.retime(_without(found.schedule, small))
        number = sum(one.times for one in small)
        what = f"larger units, such as auto_wrap_policy with more parameters ({number} small"
        yield Suggestion(saved / 2, f"{what} collectives, half of them left out)")


def _without_offload(found: Situation) -> Iterator[Suggestion]:
    """Inputs of modules in HBM, if they fit."""
    needed = found.memory.host_temporaries
    if found.schedule.host_copies and needed and needed <= found.free:
        saved = found.timing.step - found.retime(replace(found.schedule, host_copies=()))
        yield Suggestion(saved, f"offload=False ({needed / GIB:.1f} GiB more HBM)")


def _scoped_vmem(found: Situation) -> Iterator[Suggestion]:
    """More VMEM for one operation, where most of the step is compute."""
    limit = found.scoped_vmem_kib
    is_set = any("scoped_vmem_limit" in name for name in found.options)
    if limit and not is_set and found.timing.mfu and found.timing.compute > found.timing.step / 2:
        yield Suggestion(None, f"compiler_options=limit_scoped_vmem({limit}), for large matmuls")


_RULES = (
    _without_recomputation, _zero_2, _larger_batch, _bfloat16, _larger_units, _without_offload,
    _scoped_vmem,
)  # fmt: skip


def _without(schedule: Schedule, left_out: Sequence[Collective]) -> Schedule:
    ids = set(map(id, left_out))
    return replace(schedule, collectives=tuple(c for c in schedule.collectives if id(c) not in ids))


# Rules for steps that do not fit, by the memory that they free.


def _to_fit(found: Situation) -> list[Suggestion]:
    schedule = found.schedule
    again = any(op.recomputed for op in schedule.ops)
    inner = tuple(unit.name for unit in found.units if unit.name)
    stored = sum(
        one.bytes for one in schedule.live_at_peak()
        if one.category == "temporary" and one.phase == "forward"
        and any(one.module == name or one.module.startswith(f"{name}.") for name in inner)
    )  # fmt: skip
    several = []
    if stored and not again:
        several.append((stored, "checkpoint_module on each block: recompute activations"))
    again_gathered = any(
        one.kind == "all-gather" and one.phase == "backward" for one in schedule.collectives
    )
    full = sum(one.bytes for unit in found.units if unit.name for one in unit.gathered)
    if full and not again_gathered and schedule.collectives:
        several.append((full, "reshard_after_forward=True (ZeRO-3)"))
    several.sort(key=lambda one: one[0], reverse=True)
    known = [
        Suggestion(None, f"{text}: frees at most {size / GIB:.1f} GiB of HBM")
        for size, text in several
    ]
    if again and not schedule.host_copies:
        what = "offload=True: inputs of recomputed modules in host memory"
        known.append(Suggestion(None, f"{what}; the size is not modelled, plan it"))
    return known
