"""The report on a step that is cut into several programs: what its parts need, put together.

``CPUOffload(stream=True)`` has a program for each unit's forward and backward (docs/offload.md).
Equal ones are compiled once. The report is that on the part that needs most memory, with the times,
bytes and floating-point operations of all.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from .compiling.cache import CompiledStep
from .records import HostNeeds, Part, Timing
from .reporting.report import Report
from .tracing.step import TracedStep

_BACKWARD = "backward["
_STATE = re.compile(r"^\w+ of ")

_NOTE = (
    "The step is {runs} programs, {kinds} different ones, one for each forward and backward of a "
    "streamed wrapper. Memory, schedule and tables are those of the part that needs most HBM, "
    "with all else that is on the device meanwhile; times, bytes sent and MFU are of all parts. "
    "A part takes as long as the longest of its program, the shards that are sent meanwhile for "
    "the next and the gradients of the one before; the optimizer's step on the host is NOT in it."
)


def report_on_parts(
    step: TracedStep,
    compiled: Sequence[CompiledStep],
    report_on: Callable[[TracedStep, CompiledStep, int], Report],
    peak: float,
) -> Report:
    """The report on ``step``, a streamed one.

    Args:
        compiled: what the compiler made of each of ``step.parts``.
        report_on: makes the report on one of them, beside so many bytes of other tensors.
        peak: floating-point operations a second of a device.
    """
    found: dict[str, Report] = {}
    beside: Counter[str] = Counter()
    for part, one in zip(step.parts, compiled, strict=True):
        beside[one.key] = max(beside[one.key], part.beside)
    codes = {one.key: one.memory.code if one.memory else 0 for one in compiled}
    for part, one in zip(step.parts, compiled, strict=True):
        if one.key not in found:
            others = sum(codes.values()) - codes[one.key]  # executables stay on the device
            alone = replace(step, program=part.program, parts=())
            found[one.key] = report_on(alone, one, beside[one.key] + others)
    order = [found[one.key] for one in compiled]
    worst = max(found.values(), key=lambda report: (bool(report.refusal), report.memory.required))
    flops = sum(
        one.model_flops if _BACKWARD in one.traced else 3 * one.model_flops for one in compiled
    )
    timing = _timing(step, order, worst.host, flops, peak)
    note = _NOTE.format(runs=len(order), kinds=len(found))
    notes = [note, *(n for n in worst.notes if "optimizer steps on the host" not in n)]
    return replace(
        worst,
        timing=timing,
        parts=tuple(_parts(step, compiled, found)),
        compile_seconds=sum(report.compile_seconds for report in found.values()),
        from_cache=all(report.from_cache for report in found.values()),
        program_bytes=sum(codes.values()),
        warnings=tuple(dict.fromkeys(w for report in found.values() for w in report.warnings)),
        notes=tuple(notes),
    )


def _timing(
    step: TracedStep,
    reports: Sequence[Report],
    host: HostNeeds | None,
    flops: float,
    peak: float,
) -> Timing:
    timings = [report.timing for report in reports]
    compute = sum(one.compute for one in timings)
    # Behind the last part only its gradients travel, and before the first its shards.
    sent = [part.to_device for part in step.parts] + [0]
    back = [0] + [part.to_host for part in step.parts]
    link = host.link if host is not None and host.link else float("inf")
    whole = sent[0] / link + back[-1] / link
    for number, one in enumerate(timings):
        whole += max(one.step, sent[number + 1] / link, back[number] / link)
    collective = sum(one.collective for one in timings)
    return Timing(
        compute=compute,
        collective=collective,
        overlapped=sum(one.overlapped for one in timings),
        exposed=whole - compute,
        step=whole,
        model_flops=flops,
        mfu=flops / (whole * peak) if whole else 0.0,
        slots=max(reports, key=lambda report: report.memory.required).timing.slots,
    )


def _parts(
    step: TracedStep, compiled: Sequence[CompiledStep], found: dict[str, Report]
) -> list[Part]:
    times = Counter(one.key for one in compiled)
    parts: dict[str, Part] = {}
    for part, one in zip(step.parts, compiled, strict=True):
        report = found[one.key]
        if one.key not in parts:
            parts[one.key] = Part(
                name=_named(part.program.arguments, _BACKWARD in one.traced),
                times=times[one.key],
                required=report.memory.required,
                seconds=report.timing.step,
                wire_bytes=report.wire_bytes,
                to_device=part.to_device,
                to_host=part.to_host,
            )
    return list(parts.values())


def _named(arguments: Sequence[str], backward: bool) -> str:
    """Of which modules' parameters a program makes use."""
    owners = [_STATE.sub("", name).rpartition(".")[0].split(".") for name in arguments if name]
    common = ".".join(os.path.commonprefix(owners)) if owners else ""
    return f"{'backward' if backward else 'forward'} of {common or 'several modules'}"
