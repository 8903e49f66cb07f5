"""Warnings on a plan, and suggestions what to change.

Each rule applies an option to the schedule and times it again. It suggests nothing that is set
already, saves less than 1 % of the step, or needs too much memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...wording import join_some
from ..records import CompiledCollective, CompilerMemory, Schedule, Timing
from ..tracing.step import TracedStep
from ..tracing.units import TracedUnit, innermost_unit
from .tables import GIB, MIB, NO_MODULE, NUMBER, TINY, executions, timed_ops, unit_names, wire

_LITTLE_HEADROOM = 0.05
_MANY = 20  # small collectives
_MOST = 5  # suggestions
_MOST_TIMES = 16  # the batch of the step
_LEAST_SHARE = 0.01  # of the step
# Of free HBM: the need of a suggestion is an estimate.
_USABLE = 0.9
# One loop is suggested from this number of equal blocks and seconds of compilation on.
_BLOCKS, _SLOW_COMPILATION = 8, 120.0
# A unit is too large from this share of the parameters and this number of bytes on.
_LARGE_SHARE, _LARGE_UNIT = 0.6, 64 << 20


def warnings(
    schedule: Schedule, step: TracedStep, executables: int, ranks: Sequence[int], headroom: float
) -> Iterator[str]:
    if 0 <= headroom < _LITTLE_HEADROOM:
        yield (
            f"only {100 * headroom:.1f} % of HBM is free; other programs (evaluation) and "
            "fragmentation need some of it"
        )
    if executables > 1:
        yield (
            f"{executables} different programs on the {len(ranks)} traced ranks: each rank has to "
            "compile, and ranks cannot share the compilation cache"
        )
    for place in dict.fromkeys(step.reads):
        yield (
            f"a value is read on the host during the step ({place}): everything it depends on runs "
            "again in a separate program that is not planned, and the host waits for it"
        )
    for place in dict.fromkeys(step.sized_by_data):
        yield (
            f"the number of elements of a tensor depends on values ({place}): a TPU compiles "
            "another program for every new number. The plan uses the largest possible number"
        )
    if step.untrained:
        yield (
            f"{len(step.untrained)} of {step.trained} parameters that the optimizer trains got no "
            "gradient; computations with them are not in the plan: "
            f"{join_some(step.untrained, 4)}"
        )
    if not step.has_optimizer and any(c.phase == "backward" for c in schedule.collectives):
        yield (
            "there is a backward, but nothing updates the parameters; perhaps a condition on a "
            "value that was read skipped the optimizer's step (in a plan every read gives zeros)"
        )
    if step.with_closure:
        yield (
            "the optimizer is called with a closure: the plan is of the first step, in which the "
            "optimizer state does not exist yet"
        )
    if step.programs_before:
        yield (
            f"{step.programs_before} program(s) without an optimizer step ran before this one "
            "(micro-batches, evaluation) and were not planned"
        )
    missed = [
        name
        for number, name in enumerate(step.program.arguments)
        if " of " in name and number not in step.program.donated
    ]
    if missed:
        yield (
            f"{len(missed)} state tensors are not updated in place, so their old and new values "
            f"occupy memory together: {join_some(missed, 3)}"
        )
    yield from _about_collectives(schedule.collectives, any(op.cycles for op in schedule.ops))


def _about_collectives(collectives: Sequence[CompiledCollective], timed: bool) -> Iterator[str]:
    doubled, padded = Counter[str](), Counter[str]()
    for one in collectives:
        unit = unit_names([one.module])[one.module] if one.module else "the step"
        if one.kind == "all-reduce" and one.bytes >= TINY:
            if one.asked == "reduce-scatter":
                doubled[unit] += one.wire_bytes * one.times
            elif one.phase == "forward":
                padded[unit] += one.wire_bytes * one.times
    if doubled:
        yield (
            f"gradients of {_largest(doubled)} are reduced by a full all-reduce, which sends twice "
            "the bytes of a reduce-scatter"
        )
    if padded:
        yield (
            f"the forward of {_largest(padded)} sums large tensors over the ranks; if this is a "
            "gather of parameters by all-reduce of padded shards (torch_xla's pinned all_gather), "
            "it sends twice the bytes"
        )
    tiny = executions([c for c in collectives if c.bytes < TINY and not c.asynchronous])
    if tiny > _MANY:
        yield f"{tiny} synchronous collectives send less than 64 KiB each: their cost is latency"
    overlapped = [c for c in collectives if c.asynchronous or c.fused]
    if wire(collectives) and not wire(overlapped) and timed:
        yield "no collective overlaps with compute: the step contains all of their time"


def _largest(sent: Counter[str]) -> str:
    names = [name for name, _ in sent.most_common()]
    return join_some([*sorted(names[:4]), *names[4:]], 4)


@dataclass(frozen=True)
class Situation:
    """What is known of a planned step.

    ``capacity``: bytes of HBM that a step may take. ``retime``: the time of another schedule.
    ``scoped_vmem_kib``: the limit on this chip, if there is one. ``no_kernel``: why attention
    cannot use a kernel; "" if it can, or if unknown.
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
    overlaps_gathers: bool = False
    no_kernel: str = ""
    compile_seconds: float = 0.0

    @property
    def free(self) -> float:
        return _USABLE * (self.capacity - self.memory.required)

    def saved(self, **changed: Any) -> float:
        return self.timing.step - self.retime(replace(self.schedule, **changed))

    def saved_without(self, left_out: Sequence[CompiledCollective]) -> float:
        ids = set(map(id, left_out))
        some = tuple(c for c in self.schedule.collectives if id(c) not in ids)
        return self.saved(collectives=some)


@dataclass(frozen=True)
class Suggestion:
    """An option to set. ``seconds``: saved in a step; if not ``modelled``, those it concerns.

    ``needs``: HBM, listed after the gain; a suggestion that has it changes the number of samples.
    """

    seconds: float
    text: str
    modelled: bool = True
    needs: str = ""

    def line(self, step: float) -> str:
        if not self.modelled:
            return f"{self.text}; the gain is not modelled, plan it"
        share = f"{100 * self.seconds / step:.0f} %"
        if self.needs:
            return f"{self.text}: {share} less time a sample (model), {self.needs}"
        return f"{self.text}: {1e3 * self.seconds:,.2f} ms less of a step, {share} (model)"


def suggestions(found: Situation) -> list[str]:
    """At most five things to change, those that save most first; then at least one without a
    modelled gain, then what only shortens compilation.
    """
    if found.refused or found.memory.required > found.capacity:
        return _to_fit(found)[:_MOST]
    step = found.timing.step
    if not step:
        return []
    several = [one for rule in _RULES for one in rule(found)]
    several.sort(key=lambda one: one.seconds, reverse=True)
    known = [one for one in several if one.modelled and one.seconds >= _LEAST_SHARE * step]
    others = [one for one in several if not one.modelled]
    listed = [*known[: _MOST - bool(others)], *others]
    return [*(one.line(step) for one in listed), *_one_loop(found)][:_MOST]


def _without_recomputation(found: Situation) -> Iterator[Suggestion]:
    again = {op.index: op for op in found.schedule.ops if op.recomputed}
    if not again:
        return
    saved = found.saved(ops=tuple(op for op in found.schedule.ops if not op.recomputed))
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
    yield Suggestion(share * saved, f"{how} (at most {share * needed / GIB:.1f} GiB more HBM)")


def _zero_2(found: Situation) -> Iterator[Suggestion]:
    gathers = [one for one in _gathers_of_backward(found.schedule) if one.times == 1]
    needed = _full_bytes(found)
    if gathers and any(unit.name for unit in found.units) and needed <= found.free:
        how = f"reshard_after_forward=False (ZeRO-2) ({needed / GIB:.1f} GiB more HBM)"
        yield Suggestion(found.saved_without(gathers), how)


def _gathers_of_backward(schedule: Schedule) -> list[CompiledCollective]:
    return [c for c in schedule.collectives if (c.kind, c.phase) == ("all-gather", "backward")]


def _waited_gathers(schedule: Schedule) -> list[CompiledCollective]:
    return [c for c in schedule.collectives if c.kind == "all-gather" and not c.asynchronous]


def _full_bytes(found: Situation) -> int:
    """Full parameters of all units but the outermost."""
    return sum(one.bytes for unit in found.units if unit.name for one in unit.gathered)


def _larger_batch(found: Situation) -> Iterator[Suggestion]:
    each = found.memory.temporaries
    times = min(1 + int(found.free // each), _MOST_TIMES) if each else 1
    if not found.timing.model_flops or times < 2:
        return
    ops = tuple(
        op if op.phase == "optimizer" else replace(op, cycles=times * op.cycles)
        for op in found.schedule.ops
    )
    copies = tuple(replace(one, bytes=times * one.bytes) for one in found.schedule.host_copies)
    # The step now, less its share of the larger step.
    saved = ((times - 1) * found.timing.step + found.saved(ops=ops, host_copies=copies)) / times
    needs = f"at most {(times - 1) * each / GIB:.1f} GiB more HBM"
    yield Suggestion(saved, f"{times} times the batch of a device", needs=needs)


def _bfloat16(found: Situation) -> Iterator[Suggestion]:
    wide = [unit.name for unit in found.units if unit.itemsize >= 4]
    names = ["", *(unit.name for unit in found.units)]
    halved = tuple(
        replace(one, bytes=one.bytes // 2, wire_bytes=one.wire_bytes // 2)
        if one.dtype == "f32" and innermost_unit(one.module, names) in wide else one
        for one in found.schedule.collectives
    )  # fmt: skip
    if wide:
        which = f" for {join_some([name or 'the outermost unit' for name in wide], 3)}"
        of = which if len(wide) < len(found.units) else ""
        how = f"compute_dtype=torch.bfloat16{of} (counted: bytes sent; not: HBM traffic)"
        yield Suggestion(found.saved(collectives=halved), how)


def _larger_units(found: Situation) -> Iterator[Suggestion]:
    small = [c for c in found.schedule.collectives if c.bytes < TINY and not c.asynchronous]
    if len(found.units) > 2 and small:
        how = "larger units, such as auto_wrap_policy with more parameters"
        left_out = f"{executions(small)} small collectives, half of them left out"
        yield Suggestion(found.saved_without(small) / 2, f"{how} ({left_out})")


def _without_offload(found: Situation) -> Iterator[Suggestion]:
    needed = found.memory.host_temporaries
    if found.schedule.host_copies and needed and needed <= found.free:
        how = f"offload=False ({needed / GIB:.1f} GiB more HBM)"
        yield Suggestion(found.saved(host_copies=()), how)


def _scoped_vmem(found: Situation) -> Iterator[Suggestion]:
    limit = found.scoped_vmem_kib
    is_set = any("scoped_vmem_limit" in name for name in found.options)
    if limit and not is_set and found.timing.mfu and found.timing.compute > found.timing.step / 2:
        timed = timed_ops(found.schedule, found.timing)
        seconds = sum(taken for op, taken in timed.items() if op.work == "matmul")
        how = f"compiler_options=limit_scoped_vmem({limit}), for large matmuls"
        yield Suggestion(seconds, how, modelled=False)


def _one_loop(found: Situation) -> Iterator[str]:
    """It compiles faster, but makes the step longer."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for unit in found.units:
        if NUMBER.search(unit.name):
            kinds.setdefault((NUMBER.sub("", unit.name), unit.elements), []).append(unit.name)
    blocks = max(kinds.values(), key=len, default=[])
    ops = found.schedule.ops
    looped = any(op.times > 1 for op in ops)
    if len(blocks) < _BLOCKS or looped or found.compile_seconds < _SLOW_COMPILATION:
        return
    again = {op.module for op in ops if op.recomputed}
    inside = tuple(f"{name}." for name in blocks)
    twice = tuple(
        replace(op, cycles=2 * op.cycles)
        if op.phase == "forward" and f"{op.module}.".startswith(inside) and op.module not in again
        else op for op in ops
    )  # fmt: skip
    yield (
        f"scan_blocks: {len(blocks)} equal blocks in one loop; compiles faster (this program took "
        f"{found.compile_seconds:.0f} s, and its code has {found.memory.code / MIB:.0f} MiB), but "
        f"a step takes about {1e3 * abs(found.saved(ops=twice)):,.2f} ms more (model), since the "
        "backward recomputes the blocks"
    )


def _gathers_of_loops(found: Situation) -> Iterator[Suggestion]:
    """Gathers in a loop overlap with compute only with ``prefetch``."""
    waited = [one for one in _waited_gathers(found.schedule) if one.times > 1]
    if waited and found.overlaps_gathers and _full_bytes(found) / len(waited) <= found.free:
        how = "scan_blocks(prefetch=True), or no scan_blocks (at most, if all gathers overlap)"
        yield Suggestion(found.saved_without(waited), how)


def _attention_kernel(found: Situation) -> Iterator[Suggestion]:
    """A kernel does not store the scores of attention in HBM."""
    timed = timed_ops(found.schedule, found.timing)
    seconds = sum(taken for op, taken in timed.items() if op.work == "attention")
    if seconds < _LEAST_SHARE * found.timing.step:
        return
    what = f"attention takes {1e3 * seconds:,.2f} ms of a step without a kernel"
    if found.no_kernel:
        how = f"{what}, which cannot be used here: {found.no_kernel}"
    else:
        how = f"xla_fsdp.layers.scaled_dot_product_attention without attn_mask: {what}"
    yield Suggestion(seconds, how, modelled=False)


def _padding(found: Situation) -> Iterator[Suggestion]:
    ops = found.schedule.ops
    if not any(op.padding for op in ops):
        return
    without = tuple(replace(op, cycles=round(op.cycles * (1 - op.padding))) for op in ops)
    lost = Counter[str]()
    for op in ops:
        lost[NUMBER.sub(".N", op.module)] += round(op.padding * op.cycles * op.times)
    most = ", ".join(name or NO_MODULE for name, cycles in lost.most_common(2) if cycles)
    how = "dimensions that are multiples of 128, the tiles of matmuls: fewer padded elements"
    yield Suggestion(found.saved(ops=without), f"{how} (at most; mostly in {most})")


def _smaller_units(found: Situation) -> Iterator[Suggestion]:
    """Gathers of smaller units overlap with the compute of others."""
    largest = max(found.units, key=lambda unit: unit.elements, default=None)
    if largest is None:
        return
    elements = sum(unit.elements for unit in found.units)
    size = sum(one.bytes for one in largest.gathered)
    waited = [one for one in _waited_gathers(found.schedule) if one.times == 1]
    if largest.elements >= _LARGE_SHARE * elements and size >= _LARGE_UNIT and waited:
        name = largest.name or "the model"
        part = f"{100 * largest.elements / elements:.0f} %"
        how = f"smaller units: {name} has {part} of the parameters, wrap its blocks one by one"
        text = f"{how} (at most, if all gathers overlap)"
        yield Suggestion(found.saved_without(waited), text, modelled=found.overlaps_gathers)


_RULES = (
    _without_recomputation, _zero_2, _larger_batch, _bfloat16, _larger_units, _smaller_units,
    _without_offload, _scoped_vmem, _gathers_of_loops, _attention_kernel, _padding,
)  # fmt: skip


def _to_fit(found: Situation) -> list[str]:
    """Rules for steps that do not fit."""
    schedule = found.schedule
    again = any(op.recomputed for op in schedule.ops)
    inner = tuple(f"{unit.name}." for unit in found.units if unit.name)
    stored = sum(
        one.bytes for one in schedule.live_at_peak()
        if (one.category, one.phase) == ("temporary", "forward")
        and f"{one.module}.".startswith(inner)
    )  # fmt: skip
    full = _full_bytes(found)
    several = []
    if stored and not again:
        several.append((stored, "checkpoint_module on each block: recompute activations"))
    if full and schedule.collectives and not _gathers_of_backward(schedule):
        several.append((full, "reshard_after_forward=True (ZeRO-3)"))
    several.sort(key=lambda one: one[0], reverse=True)
    known = [f"{text}: frees at most {size / GIB:.1f} GiB of HBM" for size, text in several]
    if again and not schedule.host_copies:
        what = "offload=True: inputs of recomputed modules in host memory"
        known.append(f"{what}; the size is not modelled, plan it")
    return known
