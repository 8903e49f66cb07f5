"""Builds the report from the compiler's result.

The report on several programs (``CPUOffload(stream=True)``) has the memory of the one that needs
most, and the times, bytes and floating-point operations of all.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..compiled.host_options import HostOptions
from ..tpu.calibration import calibrated
from ..tpu.chips import Chip
from ..tpu.links import describe_links
from .compiling.compile_child import peak_memory
from .compiling.compiler import Target
from .compiling.plan_cache import CompiledStep
from .program.assignment import read_assignment
from .program.flops import why_no_kernel
from .program.schedule import read_schedule
from .records import CompilerMemory, ProgramPart, Schedule, Timing
from .reporting.advice import Situation, suggestions, warnings
from .reporting.report import Report
from .timing import time_step
from .tracing.step import TracedPart, TracedStep

_STATE = re.compile(r"^\w+ of ")

_BOUND = "two all-gathers and one reduce-scatter of every parameter (ZeRO-3)"
_NOTE = (
    "The step consists of {runs} programs ({kinds} of them different), one for each forward and "
    "backward of a wrapper with CPUOffload(stream=True). Memory, schedule and tables are those of "
    "the program that needs most HBM, including all other data on the device at that time. Times, "
    "bytes sent and MFU are those of all programs. The time of a program is the longest of: its "
    "execution, sending the shards for the next program, and fetching the gradients of the "
    "previous one. The optimizer's step on the host is NOT included."
)
_NO_SUGGESTIONS = (
    "The plan of a step of several programs has no suggestions: each would be about one program, "
    "and whether the step becomes shorter depends on the transfers of the others."
)
_STOPPED = (
    "The compiler assigned the buffers, found that the program does not fit, and stopped. It "
    "reported no cycle estimates and no code size. The size in its message counts only temporaries "
    "and memory that the compiler reserves; 'required' here also counts arguments and outputs."
)
_THEN_ON_THE_HOST = (
    "The optimizer steps on the host after this program. The modelled step does not include its "
    "time, nor that of the transfers."
)


def make_report(
    target: Target,
    host: HostOptions,
    step: TracedStep,
    compiled: CompiledStep,
    other_programs: int | None = None,
    *,
    ranks: tuple[int, ...] = (0,),
    executables: int = 1,
    title: str = "",
) -> Report:
    """The report on ``compiled``, the program of ``step``.

    ``other_programs``: bytes of the other programs of a streamed step; ``None`` if this program is
    the entire step. ``executables``: the number of different programs among those of ``ranks``.
    """
    measured, where = target.measured, calibrated(target.where, target.measured)
    chip, capacity = where.chip, where.chip.device_usable_hbm_bytes(host.chip_config)
    schedule, memory = _laid_out(compiled, step, chip)
    memory = replace(memory, other_programs=other_programs or 0)
    to_host = to_device = chip.device_host_bandwidth
    if measured is not None:
        to_host, to_device = measured.to_host or to_host, measured.to_device or to_device

    def time(schedule: Schedule) -> Timing:
        return time_step(schedule, where, compiled.flops, (to_host, to_device))

    timing = time(schedule)
    notes = []
    if compiled.refusal and compiled.scheduled:
        notes.append(_STOPPED)
    if schedule.to_host or schedule.to_device:
        source = chip.sources["pcie_bandwidth"]
        if measured is not None and measured.to_host and measured.to_device:
            source = measured.source
        notes.append(
            f"Copies to the host take {1e3 * schedule.to_host / to_host:.2f} ms of a step and "
            f"those back {1e3 * schedule.to_device / to_device:.2f} ms ({source}), overlapped with "
            "compute in the order of the schedule: they add "
            f"{1e3 * timing.copies:.2f} ms to the step."
        )
    if measured is not None:
        notes.append(measured.note(target.where.chip))
    elif other_programs is None and not compiled.refusal and timing.compute and chip.published:
        times, runs = chip.published
        notes.append(
            f"Published runs on {chip.family} took {times:.2f} times the modelled step (median of "
            f"{runs}, docs/design/published-runs.md), which would be "
            f"{1e3 * times * timing.step:,.1f} ms here."
        )
    needs = None
    if step.host is not None:
        needs = replace(
            step.host,
            ranks=where.devices // where.hosts,
            capacity=where.host_memory,
            source=chip.sources["host_memory"],
            link=chip.device_host_bandwidth,
            link_source=chip.sources["pcie_bandwidth"],
        )
        notes += [_THEN_ON_THE_HOST] if other_programs is None else []
    situation = Situation(
        schedule=schedule,
        timing=timing,
        memory=memory,
        capacity=capacity,
        refused=bool(compiled.refusal),
        units=step.units,
        retime=lambda other: time(other).step,
        options=frozenset(host.whose),
        scoped_vmem_kib=chip.scoped_vmem_kib,
        overlaps_gathers=chip.overlaps_gathers,
        no_kernel=why_no_kernel(compiled.traced, chip),
        compile_seconds=compiled.seconds,
    )
    headroom = 1 - memory.required / capacity
    return Report(
        topology=where.name,
        chip=chip.family,
        devices=where.devices,
        hbm_capacity=capacity,
        hbm_source=chip.sources["usable_hbm_bytes"],
        memory=memory,
        schedule=schedule,
        timing=timing,
        bound_wire_bytes=step.bound,
        bound_label="" if step.bound is None else _BOUND,
        link_model=describe_links(where),
        compile_seconds=compiled.seconds,
        program_bytes=memory.code,
        ranks_traced=ranks,
        executables=executables,
        from_cache=compiled.from_cache,
        title=title,
        versions=compiled.versions,
        compiler_options={
            name: f"{compiled.options.get(name, 'unknown to this libtpu, ignored')} ({whose})"
            for name, whose in host.whose.items()
        },
        chip_config=host.chip_config or "",
        warnings=tuple(warnings(schedule, step, executables, ranks, headroom)),
        notes=tuple(notes),
        suggestions=tuple(suggestions(situation)),
        refusal=compiled.refusal,
        host=needs,
        planner_host_memory=peak_memory(),
        compiler_host_memory=compiled.host_memory,
    )


def _laid_out(
    compiled: CompiledStep, step: TracedStep, chip: Chip
) -> tuple[Schedule, CompilerMemory]:
    """The schedule and its memory; empty or estimated if the compiler stopped early."""
    if not compiled.scheduled:
        return Schedule(0, (), (), (), (), 0), CompilerMemory(0, 0, 0, 0, 0, 0)
    assignment = read_assignment(compiled.assignment)
    schedule = read_schedule(compiled.scheduled, assignment, step.program.arguments, chip)
    peak, memory = max(schedule.curve), compiled.memory
    if memory is None:
        memory = CompilerMemory(
            arguments=assignment.bytes_of("argument"),
            outputs=assignment.bytes_of("output"),  # without those in the buffer of an argument
            aliased=0,
            temporaries=assignment.bytes_of("temporary"),
            code=0,
            peak=peak,
        )
    if assignment.on_host:
        memory = replace(memory, peak=peak, host_temporaries=assignment.on_host)
    return schedule, memory


def report_on_parts(
    step: TracedStep,
    compiled: Sequence[CompiledStep],
    report_on: Callable[[TracedStep, CompiledStep, int], Report],
    peak: float,
) -> Report:
    """The report on ``step``, a step of several programs.

    ``compiled``: of each of ``step.parts``. The last argument of ``report_on``: bytes of other
    tensors on the device. ``peak``: FLOP/s of a device.
    """
    both = list(zip(step.parts, compiled, strict=True))
    codes = {one.key: one.memory.code if one.memory else 0 for one in compiled}
    times = Counter(one.key for one in compiled)
    found: dict[str, Report] = {}
    parts = []
    for part, one in both:
        if one.key in found:
            continue
        tensors = max(other.other_programs for other, same in both if same.key == one.key)
        others = sum(codes.values()) - codes[one.key]  # all executables stay on the device
        alone = replace(step, program=part.program, parts=())
        report = found[one.key] = report_on(alone, one, tensors + others)
        parts.append(
            ProgramPart(
                name=_name_of_part(part.program.arguments, part.backward),
                times=times[one.key],
                required=report.memory.required,
                seconds=report.timing.step,
                wire_bytes=report.wire_bytes,
                to_device=part.to_device,
                to_host=part.to_host,
            )
        )
    worst = max(found.values(), key=lambda report: (bool(report.refusal), report.memory.required))
    # A program without a backward counts three times what it computes itself.
    flops = sum(one.flops if part.backward else 3 * one.flops for part, one in both)
    timings = [found[one.key].timing for one in compiled]
    return replace(
        worst,
        timing=_timing(step.parts, timings, worst, flops, peak),
        parts=tuple(parts),
        compile_seconds=sum(report.compile_seconds for report in found.values()),
        from_cache=all(report.from_cache for report in found.values()),
        program_bytes=sum(codes.values()),
        compiler_host_memory=max(one.host_memory for one in compiled),
        warnings=tuple(dict.fromkeys(w for report in found.values() for w in report.warnings)),
        suggestions=(),
        notes=(_NOTE.format(runs=len(compiled), kinds=len(found)), _NO_SUGGESTIONS, *worst.notes),
    )


def _timing(
    parts: Sequence[TracedPart], timings: Sequence[Timing], worst: Report, flops: float, peak: float
) -> Timing:
    # Before the first part only its shards are sent; after the last, only its gradients.
    sent = [*(part.to_device for part in parts), 0]
    back = [0, *(part.to_host for part in parts)]
    link = worst.host.link if worst.host is not None and worst.host.link else float("inf")
    whole = sent[0] / link + back[-1] / link
    for number, one in enumerate(timings):
        whole += max(one.step, sent[number + 1] / link, back[number] / link)
    compute, copies = sum(one.compute for one in timings), sum(one.copies for one in timings)
    return Timing(
        compute=compute,
        collective=sum(one.collective for one in timings),
        overlapped=sum(one.overlapped for one in timings),
        exposed=whole - compute - copies,
        step=whole,
        model_flops=flops,
        mfu=flops / (whole * peak) if whole else 0.0,
        slots=worst.timing.slots,
        copies=copies,
    )


def _name_of_part(arguments: Sequence[str], backward: bool) -> str:
    owners = [_STATE.sub("", name).rpartition(".")[0].split(".") for name in arguments if name]
    common = ".".join(os.path.commonprefix(owners)) if owners else ""
    return f"{'backward' if backward else 'forward'} of {common or 'several modules'}"
