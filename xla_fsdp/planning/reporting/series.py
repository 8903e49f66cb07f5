"""The data of the pictures: HBM over the schedule, and the lanes of a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy

from ..records import Buffer, Schedule, Slot
from .amounts import GIB, short, units
from .findings import Findings
from .spans import DETAIL, Span, blocks, by_unit, merge, numbered, thinned

MODULE, COMPUTE = "module", "compute"
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
LANES = (MODULE, COMPUTE, SYNCHRONOUS, ASYNCHRONOUS)  # from top to bottom
# Okabe and Ito's colours, which colour-blind people can distinguish.
COLORS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#0072B2",
        "backward": "#009E73",
        "optimizer": "#CC79A7",
        "": "#8A8A8A",
        SYNCHRONOUS: "#D55E00",
        ASYNCHRONOUS: "#56B4E9",
        "arguments": "#BDBDBD",
        "outputs": "#6E6E6E",
        "gathered weights": "#E69F00",
        "made in forward": "#0072B2",
        "made in backward": "#009E73",
        "made in optimizer": "#CC79A7",
        "other temporaries": "#56B4E9",
        "capacity": "#D55E00",
    }
)
KINDS = tuple(COLORS)[:6]  # the kinds of spans in the timeline
PURPOSES = tuple(COLORS)[6:13]  # the uses of memory, from bottom to top
_OFF_AXIS = 4.0  # a capacity above this multiple of the peak is not on the axis


@dataclass(frozen=True)
class Curve:
    """HBM in use, in bytes, at some ``places`` of the schedule, including the peak."""

    places: numpy.ndarray
    seconds: numpy.ndarray  # modelled time at those places
    total: numpy.ndarray
    stack: Mapping[str, numpy.ndarray]  # the total divided by purpose


def hbm(report: Findings) -> Curve:
    """HBM in use over the schedule: the highest place of each interval of about one pixel."""
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
    """The buffers by purpose, with the names that pictures use."""
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


def ceiling(report: Findings) -> tuple[float, bool]:
    """The end of the axis of HBM in bytes, and whether the axis includes the capacity."""
    peak = max(max(report.schedule.curve, default=0), 1)
    shown = report.hbm_capacity < _OFF_AXIS * peak
    return (1.18 * max(peak, report.hbm_capacity) if shown else 1.35 * peak), shown


def caption(report: Findings) -> str:
    """The title, and why the required memory is more than the live peak."""
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


def lanes(report: Findings) -> dict[str, list[Span]]:
    """The modelled timeline; see :func:`timeline`."""
    return timeline(report.timing.slots, 1e3 * duration(report))


def timeline(slots: Sequence[Slot], total: float) -> dict[str, list[Span]]:
    """The timeline, in milliseconds up to ``total``: ``module`` (top-level units of the compute),
    ``compute`` (by phase), ``synchronous`` and ``asynchronous`` collectives.
    """
    unit = units(s.module for s in slots)
    found: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for s in slots:
        times, busy = (1e3 * s.begin, 1e3 * s.end), 1e3 * (s.end - s.begin)
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


def phases(report: Findings) -> list[Span]:
    """The spans of forward, backward and optimizer in the schedule, in places."""
    spans = [
        Span(op.index, op.index + 1, op.phase, op.phase, 1.0)
        for op in report.schedule.ops
        if op.phase
    ]
    return blocks(spans, report.schedule.length, 0.01)


def duration(report: Findings) -> float:
    """The modelled length of the timeline in seconds."""
    return max((s.end for s in report.timing.slots), default=report.timing.step)


def lane_name(lane: str, spans: list[Span], room: float) -> list[str]:
    """The name of a lane, in lines; ``room``: as in ``captions``."""
    if lane == MODULE:
        inside = numbered(spans, room).rpartition(".")[2]
        return [f"{lane},", f"{short(inside, 12)}.N"] if inside else [lane]
    if lane == COMPUTE:
        return [lane]
    binned = any(s.height < 1 for s in spans)
    return ["collectives,", lane, *(["(share of time)"] if binned else [])]


def _seconds(report: Findings, places: numpy.ndarray) -> numpy.ndarray:
    """Modelled time at places of the schedule; asynchronous collectives do not count."""
    begins: dict[int, float] = {report.schedule.length: duration(report)}
    for slot in report.timing.slots:
        if not slot.asynchronous:
            begins[slot.index] = min(slot.begin, begins.get(slot.index, slot.begin))
    index = sorted(begins)
    return numpy.interp(places, index, numpy.maximum.accumulate([begins[i] for i in index]))
