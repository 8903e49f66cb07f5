"""From what the compiler said of a step to the report on it."""

from __future__ import annotations

from dataclasses import replace

from ..compiled.host_options import HostOptions
from ..tpu.calibration import Calibration, calibrated
from ..tpu.chips import Chip
from ..tpu.links import describe, odd_groups
from ..tpu.topology import Slice
from .compiling.cache import CompiledStep
from .compiling.compiler import versions
from .program.assignment import read_assignment
from .program.schedule import read_schedule
from .records import CompilerMemory, Schedule
from .reporting import advice
from .reporting.report import Report
from .timing import time_step
from .tracing.step import TracedStep


def make_report(
    where: Slice,
    compiled: CompiledStep,
    step: TracedStep,
    ranks: tuple[int, ...],
    executables: int,
    title: str,
    host: HostOptions,
    measured: Calibration | None = None,
    beside: int = 0,
) -> Report:
    """The report on ``compiled``, the program of ``step``.

    Args:
        ranks: those whose programs were compared.
        executables: how many different ones they have.
        title: heads the report and its pictures.
        host: what libtpu was told.
        measured: figures for the times instead of published ones.
        beside: bytes on the device that the program knows nothing of.
    """
    published = where.chip
    where = calibrated(where, measured)
    schedule, memory = _laid_out(compiled, step, where.chip)
    memory = replace(memory, beside=beside)
    chip = where.chip
    timing = time_step(schedule, where, compiled.model_flops)
    notes = list(odd_groups(schedule.collectives, where))
    if compiled.refusal and compiled.scheduled:
        notes.append(
            "The compiler laid the program out, found that it does not fit, and stopped: it gave "
            "no cycle estimates and no size of code. What it counts against its limit (see its "
            "message) are temporaries and what it reserves for itself; required here counts "
            "arguments and outputs as well."
        )
    if schedule.to_host or schedule.to_device:
        notes.append(
            "Copies between HBM and the host's memory take no time here: no figures of the links "
            "between them are published. They run beside compute, as far as they are fast enough."
        )
        notes += _copies(schedule, measured)
    if measured is not None:
        notes.append(measured.note(published))
    needs = None
    if step.host is not None:
        needs = replace(
            step.host,
            ranks=where.devices // where.hosts,
            capacity=where.host_memory,
            source=chip.sources["host_memory"],
            link=chip.pcie_bandwidth / chip.devices,
            link_source=chip.sources["pcie_bandwidth"],
        )
        notes.append(
            "The optimizer steps on the host, after this program: neither its time nor that of the "
            "transfers is in the modelled step."
        )
    capacity = chip.device_usable_hbm_bytes(host.chip_config)
    return Report(
        topology=where.name,
        chip=chip.family,
        devices=where.devices,
        hbm_capacity=capacity,
        hbm_source=chip.sources["usable_hbm_bytes"],
        memory=memory,
        schedule=schedule,
        timing=timing,
        bound_wire_bytes=step.bound.wire_bytes if step.bound else None,
        bound_label=step.bound.label if step.bound else "",
        link_model=describe(where),
        compile_seconds=compiled.seconds,
        program_bytes=memory.code,
        ranks_traced=ranks,
        executables=executables,
        from_cache=compiled.from_cache,
        title=title,
        versions=versions(),
        compiler_options={
            name: f"{compiled.options.get(name, 'unknown to this libtpu, ignored')} ({whose})"
            for name, whose in host.whose.items()
        },
        chip_config=host.chip_config or "",
        warnings=tuple(
            advice.warnings(schedule, step, executables, ranks, 1 - memory.required / capacity)
        ),
        notes=tuple(notes),
        refusal=compiled.refusal,
        host=needs,
    )


def _copies(schedule: Schedule, measured: Calibration | None) -> list[str]:
    """What the copies to and from the host would take alone, if that is known."""
    if measured is None or not measured.to_host or not measured.to_device:
        return []
    out, back = schedule.to_host / measured.to_host, schedule.to_device / measured.to_device
    return [
        f"At the rates that {measured.source} has, copies to the host take {1e3 * out:.2f} ms and "
        f"those back {1e3 * back:.2f} ms of a step, if nothing else uses the host's link."
    ]


def _laid_out(
    compiled: CompiledStep, step: TracedStep, chip: Chip
) -> tuple[Schedule, CompilerMemory]:
    """The schedule and the memory it needs, as far as the compiler got with them."""
    if not compiled.scheduled:
        nothing = Schedule(0, (), (), (), (), 0, {})
        return nothing, CompilerMemory(0, 0, 0, 0, 0, 0)
    assignment = read_assignment(compiled.assignment)
    schedule = read_schedule(compiled.scheduled, assignment, step.program.arguments, chip)
    memory = compiled.memory
    if memory is not None:
        if assignment.on_host:
            peak = max(schedule.curve)
            memory = replace(memory, peak=peak, host_temporaries=assignment.on_host)
        return schedule, memory
    return schedule, CompilerMemory(
        arguments=assignment.held("argument"),
        outputs=assignment.held("output"),  # those that take no argument's buffer
        aliased=0,
        temporaries=assignment.held("temporary"),
        code=0,
        peak=max(schedule.curve),
        host_temporaries=assignment.on_host,
    )
