"""HBM in use over the schedule, thinned out to what a picture can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from ..records import Buffer, Schedule
from .amounts import GIB
from .lanes import duration
from .palette import PURPOSES
from .spans import DETAIL

if TYPE_CHECKING:
    from .report import Report

_OFF_AXIS = 4.0  # a capacity this many times the peak would flatten the curve


@dataclass(frozen=True)
class Curve:
    """HBM in use, in bytes, thinned out: ``places`` of the schedule with the peak among them."""

    places: numpy.ndarray
    seconds: numpy.ndarray  # modelled time at those places
    total: numpy.ndarray
    stack: Mapping[str, numpy.ndarray]  # total, by what the bytes are for


def hbm(report: Report) -> Curve:
    """HBM in use over the schedule, the highest place of every stretch too short to be drawn."""
    schedule = report.schedule
    total = numpy.asarray(schedule.curve, dtype=float)
    edges = numpy.linspace(0, len(total), min(len(total), DETAIL) + 1).astype(int)
    spots = [a + int(numpy.argmax(total[a:b])) for a, b in zip(edges, edges[1:], strict=False)]
    if 0 <= schedule.peak_index < len(total):
        spots = sorted({*spots, schedule.peak_index})
    places = numpy.array(spots, dtype=int)
    stack = {}
    for name, buffers in purposes(schedule).items():
        change = numpy.zeros(len(total) + 1)
        for b in buffers:
            change[min(max(b.born, 0), len(total))] += b.bytes
            change[min(max(b.dies + 1, 0), len(total))] -= b.bytes
        if change.any():
            stack[name] = numpy.cumsum(change)[places]
    gap = total[places] - sum(stack.values()) if stack else total[places]
    if (gap > 0).any():
        stack["other temporaries"] = stack.get("other temporaries", 0.0) + numpy.maximum(gap, 0)
    return Curve(places, _seconds(report, places), total[places], stack)


def purposes(schedule: Schedule) -> dict[str, list[Buffer]]:
    """The buffers by what they hold, as pictures call it."""
    gathers = {c.name for c in schedule.collectives if "all-gather" in (c.kind, c.asked)}
    found: dict[str, list[Buffer]] = {name: [] for name in PURPOSES}
    for buffer in schedule.buffers:
        if buffer.category != "temporary":
            found[buffer.category + "s"].append(buffer)
        elif buffer.name in gathers or buffer.opcode.startswith("all-gather"):
            found["gathered weights"].append(buffer)
        else:
            phase = f"made in {buffer.phase}"
            found[phase if phase in found else "other temporaries"].append(buffer)
    return found


def ceiling(report: Report) -> tuple[float, bool]:
    """Where the axis of HBM ends, in bytes, and whether the capacity is on it."""
    peak = max(max(report.schedule.curve, default=0), 1)
    shown = report.hbm_capacity < _OFF_AXIS * peak
    return (1.18 * max(peak, report.hbm_capacity) if shown else 1.35 * peak), shown


def holds(buffer: Buffer) -> str:
    """Whose buffer it is: arguments go by their own name, all others by their module."""
    return buffer.name if buffer.category == "argument" else buffer.module


def explained(report: Report) -> str:
    """What was planned, and why more is required than what is live at the peak."""
    what = ", ".join(x for x in (report.title, report.topology, report.chip) if x)
    peak = max(report.schedule.curve, default=0)
    more = (report.memory.required - peak) / GIB
    if more < 0 or not peak:
        return f"{what}."
    parts = "code, fragmentation and alignment" if report.memory.code else "fragmentation"
    size = "" if report.memory.code else " (the size of the code is unknown)"
    return f"{what}. Required: {peak / GIB:.2f} GiB live at the peak, and {more:.2f} GiB of " + (
        f"{parts}{size}."
    )


def _seconds(report: Report, places: numpy.ndarray) -> numpy.ndarray:
    """Modelled time at places of the schedule, by what runs there (not what is in flight)."""
    begins: dict[int, float] = {report.schedule.length: duration(report)}
    for slot in report.timing.slots:
        if not slot.asynchronous:
            begins[slot.index] = min(slot.begin, begins.get(slot.index, slot.begin))
    index = sorted(begins)
    return numpy.interp(places, index, numpy.maximum.accumulate([begins[i] for i in index]))
