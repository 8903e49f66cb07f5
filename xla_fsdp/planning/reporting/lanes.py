"""The modelled timeline of a step as lanes, and the phases of its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .amounts import short
from .blocks import blocks, by_unit, numbered
from .palette import ASYNCHRONOUS, SYNCHRONOUS
from .spans import DETAIL, Span, merge, thinned
from .units import units

if TYPE_CHECKING:
    from .report import Report

MODULE, COMPUTE = "module", "compute"
LANES = (MODULE, COMPUTE, SYNCHRONOUS, ASYNCHRONOUS)  # from the top down


def lanes(report: Report) -> dict[str, list[Span]]:
    """The timeline, in seconds: ``module`` (top-level units of the compute), ``compute`` (by
    phase), ``synchronous`` and ``asynchronous`` collectives.
    """
    slots, total = report.timing.slots, duration(report)
    unit = units(s.module for s in slots)
    found: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for s in slots:
        times, busy = (s.begin, s.end), s.end - s.begin
        label = f"{s.label}, {s.module}" if s.module else s.label
        if s.lane == COMPUTE:
            found[COMPUTE].append(Span(*times, s.phase, label, busy))
            if unit[s.module]:
                found[MODULE].append(Span(*times, s.phase, unit[s.module], busy))
        else:
            kind = ASYNCHRONOUS if s.asynchronous else SYNCHRONOUS
            found[kind].append(Span(*times, kind, label, busy))
    found[MODULE] = by_unit(found[MODULE], total)
    found[COMPUTE] = merge(found[COMPUTE], total / DETAIL)
    for lane in (SYNCHRONOUS, ASYNCHRONOUS):
        found[lane] = thinned(found[lane], total)
    return found


def phases(report: Report) -> list[Span]:
    """Where forward, backward and optimizer lie in the schedule, in places."""
    spans = [
        Span(op.index, op.index + 1, op.phase, op.phase, 1.0)
        for op in report.schedule.ops
        if op.phase
    ]
    return blocks(spans, report.schedule.length, 0.01)


def duration(report: Report) -> float:
    """Modelled seconds the timeline spans."""
    return max((s.end for s in report.timing.slots), default=report.timing.step)


def lane_name(lane: str, spans: list[Span], room: float) -> list[str]:
    """What stands next to a lane, in lines; ``room`` is that of ``captions``."""
    if lane == MODULE:
        inside = numbered(spans, room).rpartition(".")[2]
        return [f"{lane},", f"{short(inside, 12)}.N"] if inside else [lane]
    if lane == COMPUTE:
        return [lane]
    binned = any(s.height < 1 for s in spans)
    return ["collectives,", lane, *(["(share of time)"] if binned else [])]
