"""The pictures of a report, drawn with matplotlib, and its timeline as a trace for Perfetto.

Thread-safe: nothing here uses the global state of pyplot and rcParams.
"""

from __future__ import annotations

import base64
import io
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..records import Slot
from .tables import GIB, buffers_by_kind, milliseconds, reason, short, unit_names, why_no_pictures

if TYPE_CHECKING:
    from .report import Report

# Okabe and Ito's colours, for colour-blind people.
COLORS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#0072B2",
        "backward": "#009E73",
        "optimizer": "#CC79A7",
        "recomputation": "#E69F00",
        "other compute": "#8A8A8A",
        "synchronous collective: compute waits": "#D55E00",
        "asynchronous: compute continues": "#56B4E9",
        "parameters": "#6E6E6E",
        "optimizer state": "#9A9A9A",
        "other arguments": "#C4C4C4",
        "outputs": "#444444",
        "gathered weights": "#E69F00",
        "other activations": "#D6E8F5",
        "made in backward": "#009E73",
        "made in optimizer": "#CC79A7",
        "other temporaries": "#56B4E9",
    }
)
_KINDS = tuple(COLORS)[:7]
_ACTIVATIONS = ("#0072B2", "#3A93C6", "#74B3D8", "#A6CEE6")
_SYNCHRONOUS, _ASYNCHRONOUS = _KINDS[5:]
_UNIT, _RED, _GREEN = "#DDE3EA", "#B03A00", "#00694F"
_OFF_AXIS = 4.0  # a capacity above this multiple of the peak is not shown
_BINS = 750  # of an axis
_WIDTH = 11.2  # inches
_ROOM = 140  # characters

Interval = tuple[float, float, tuple[str, str]]  # begin, end, (name, phase)


def canvas(width: float, height: float) -> Figure:
    """An empty figure; the size is in inches."""
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def embed(figure: Figure) -> str:
    data = base64.b64encode(png(figure)).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'


def draw(report: Report) -> Figure:
    """HBM over the schedule, and the timeline; or a message if one is missing."""
    lines = [report.verdict, _caption(report), reason(report), why_no_pictures(report)]
    wrapped = (row for line in lines if line for row in textwrap.wrap(_known(line), _ROOM)[:3])
    heading = "\n".join(wrapped)
    has_memory, has_timeline = bool(report.schedule.curve), not why_no_pictures(report)
    figure = canvas(_WIDTH, 1.2 + 5.2 * has_memory + 5.6 * has_timeline)
    color = _GREEN if report.fits else _RED
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, color=color, parse_math=False)
    if not has_memory:
        figure.set_layout_engine("none")
        return figure
    ratios = (5, 3, 2) if has_timeline else (5,)
    grid = figure.add_gridspec(len(ratios), height_ratios=ratios)
    axes, length = figure.add_subplot(grid[0]), max(report.schedule.length, 1)
    _draw_memory(report, axes, numpy.arange(len(report.schedule.curve)), length)
    axes.set_xlabel(f"place in the compiled schedule (of {length:,} instructions)")
    phases = [
        (op.index, op.index + 1, ("", "recomputation" if op.recomputed else op.phase))
        for op in report.schedule.ops
        if op.phase
    ]
    top = axes.get_ylim()[1]
    for begin, end, (_, phase) in _busiest(phases, length, bridge=True):
        axes.broken_barh([(begin, end - begin)], (0.96 * top, 0.04 * top), color=COLORS[phase])
        style: dict[str, Any] = {"color": "white", "fontsize": 8, "ha": "center", "va": "center"}
        text = _fitting(phase, (end - begin) / length * _ROOM)
        axes.text((begin + end) / 2, 0.978 * top, text, **style)
    kinds = axes.get_legend_handles_labels()[1]
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8.5,
        columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip
    pad = 8 + 14 * math.ceil(len(kinds) / 4)
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=10, weight="bold", pad=pad)
    if has_timeline:
        timing, end = report.timing, end_of_last(report.timing.slots)
        axes = figure.add_subplot(grid[1])
        draw_lanes(axes, timing.slots, end)
        waits = f"{milliseconds(timing.exposed, 1)} wait for collectives; MFU {timing.mfu:.0%}"
        title = f"Timeline of one step (modelled, not measured): {milliseconds(timing.step, 1)}"
        axes.set_title(f"{title}, of which {waits}", loc="left", pad=40, weight="bold")
        below = figure.add_subplot(grid[2], sharex=axes)
        _draw_memory(report, below, 1e3 * _seconds(report), 1e3 * end, to_capacity=True)
        below.set_xlabel("modelled time, ms")
    return figure


def _caption(report: Report) -> str:
    what = ", ".join(x for x in (report.title, report.topology, report.chip) if x)
    peak = max(report.schedule.curve, default=0)
    more = (report.memory.required - peak) / GIB
    if more < 0 or not peak:
        return f"{what}."
    parts = "code, fragmentation and alignment" if report.memory.code else "fragmentation"
    size = "" if report.memory.code else " (the size of the code is unknown)"
    live = f"{peak / GIB:.2f} GiB live at the peak"
    return f"{what}. Required: {live}, and {more:.2f} GiB of {parts}{size}."


def _known(text: str) -> str:
    """Escapes characters that matplotlib's font lacks."""
    return "".join(
        c if c in "…×–" or (c < "\u0250" and c.isprintable()) else ascii(c)[1:-1] for c in text
    )


def _draw_memory(
    report: Report, axes: Axes, x: numpy.ndarray, end: float, to_capacity: bool = False
) -> None:
    """``x``: of each place; ``end``: of the axis. ``to_capacity``: always show the capacity."""
    spots, stack = hbm(report)
    places, values = numpy.append(x[spots], end), list(stack.values())
    heights = [numpy.append(one, one[-1:]) / GIB for one in values]
    shades = iter(_ACTIVATIONS)
    colors = [COLORS.get(kind) or next(shades) for kind in stack]
    axes.stackplot(places, heights, labels=list(stack), colors=colors, step="post", linewidth=0)
    # Thin: a peak of a few places would otherwise be all line.
    axes.plot(places, sum(heights), color="#555555", linewidth=0.35, drawstyle="steps-post")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel("HBM in use,\nGiB a device")
    axes.xaxis.set_major_formatter("{x:,g}")
    peak, capacity = max(report.schedule.curve) / GIB, report.hbm_capacity / GIB
    shown = to_capacity or capacity < _OFF_AXIS * peak
    if shown:
        axes.axhline(capacity, color=_RED, linewidth=1.8, linestyle="--")
    axes.set(xlim=(0, end), ylim=(0, 1.18 * max(peak, capacity * shown, 1 / GIB)))
    axes.plot(x[[report.schedule.peak_index]], [peak], marker="v", color="black", clip_on=False)
    where = "dashed" if shown else "dashed in the picture below"
    words = f"peak {peak:.2f} GiB; capacity {capacity:.2f} GiB ({where})"
    axes.set_title(words, loc="left", fontsize=10, weight="bold")


def hbm(report: Report) -> tuple[numpy.ndarray, dict[str, numpy.ndarray]]:
    """Places of the schedule (the highest of each interval), and HBM in bytes there by purpose."""
    total = numpy.asarray(report.schedule.curve, dtype=float)
    edges = numpy.linspace(0, len(total), min(len(total), 2 * _BINS) + 1).astype(int)
    pairs = zip(edges, edges[1:], strict=False)
    spots = numpy.array([a + int(numpy.argmax(total[a:b])) for a, b in pairs], dtype=int)
    stack = {}
    for name, buffers in buffers_by_kind(report.schedule).items():
        change = numpy.zeros(len(total) + 1)
        for b in buffers:
            change[b.born] += b.bytes
            change[min(b.dies + 1, len(total))] -= b.bytes
        if change.any():
            stack[name] = numpy.cumsum(change)[spots]
    rest = numpy.maximum(total[spots] - sum(stack.values()), 0)
    if rest.any():
        stack["other temporaries"] = stack.get("other temporaries", 0.0) + rest
    return spots, stack


def end_of_last(slots: Sequence[Slot]) -> float:
    return max((slot.end for slot in slots), default=0.0)


def draw_lanes(axes: Axes, slots: Sequence[Slot], end: float) -> None:
    """Draw a timeline up to ``end`` seconds."""
    axes.set(xlim=(0, 1e3 * end), ylim=(-0.1, 4))
    axes.spines[["top", "right"]].set_visible(False)
    compute = [s for s in slots if s.lane == "compute"]
    inside = _draw_units(axes, compute, end)
    phases = [
        (s.begin, s.end, ("", "recomputation" if s.recomputed else s.phase or "other compute"))
        for s in compute
    ]
    bars = [(s, e, phase) for s, e, (_, phase) in _busiest(phases, end, bridge=False)]
    rows = [(2, bars)]
    for row, kind in enumerate((_ASYNCHRONOUS, _SYNCHRONOUS)):
        some = [s for s in slots if s.lane == "collective" and s.asynchronous == (row == 0)]
        rows.append((row, [(s.begin, s.end, kind) for s in some]))
    for row, bars in rows:
        where = [(1e3 * s, 1e3 * (e - s)) for s, e, _ in bars]
        axes.broken_barh(where, (row, 0.85), facecolors=[COLORS[k] for _, _, k in bars])
    names = ["collectives,\nasynchronous", "collectives,\nsynchronous", "compute", inside]
    axes.set_yticks([0.42, 1.42, 2.42, 3.5], names, parse_math=False)
    present = {kind for _, bars in rows for _, _, kind in bars}
    patches = [Patch(color=COLORS[kind], label=kind) for kind in _KINDS if kind in present]
    axes.legend(
        handles=patches, ncols=4, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1),
        frameon=False, columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip


def _draw_units(axes: Axes, compute: Sequence[Slot], end: float) -> str:
    """Draws units, or their parents if most boxes are too narrow; returns the name of the lane."""
    unit = unit_names(s.module for s in compute)
    named = [s for s in compute if unit[s.module]]
    if not named:
        axes.text(0, 3.5, "  the program has no module names", va="center", color="#666666")
        return "module"
    for level in (unit, {m: u.rpartition(".")[0] or u for m, u in unit.items()}):
        intervals = [(s.begin, s.end, (level[s.module], s.phase)) for s in named]
        boxes = _busiest(intervals, end, bridge=True)
        texts = [_fitting(name, (e - s) / end * _ROOM) for s, e, (name, _) in boxes]
        spans = [e - s for s, e, _ in boxes]
        if 2 * sum(span for span, text in zip(spans, texts, strict=True) if text) >= sum(spans):
            break
    bars = [(1e3 * s, 1e3 * (e - s)) for s, e, _ in boxes]
    axes.broken_barh(bars, (3.1, 0.8), facecolors=_UNIT, edgecolor="white")
    for (begin, length), text in zip(bars, texts, strict=True):
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}
        axes.text(begin + length / 2, 3.48, _known(text), parse_math=False, **style)
    parents = {name.rpartition(".")[0] for (_, _, (name, _)), t in zip(boxes, texts, strict=True)
               if t.isdigit()}  # fmt: skip
    return f"module,\n{_known(short(min(parents), 12))}.N" if len(parents) == 1 else "module"


def _fitting(name: str, room: float) -> str:
    return next((text for text in (name, name.rpartition(".")[2]) if len(text) <= room), "")


def _busiest(intervals: Iterable[Interval], end: float, bridge: bool) -> list[Interval]:
    """The label that takes most time in each bin, joined over bins; ``bridge``: also over gaps."""
    width = end / _BINS or 1.0
    busy = [defaultdict[tuple[str, str], float](float) for _ in range(_BINS)]
    for begin, stop, label in intervals:
        last = min(int(stop / width), _BINS - 1)
        for i in range(min(int(begin / width), last), last + 1):
            busy[i][label] += max(min(stop, (i + 1) * width) - max(begin, i * width), 0.0)
    runs: list[Interval] = []
    for i, times in enumerate(busy):
        if not times:
            continue
        begin, label = i * width, max(times, key=times.__getitem__)
        if runs and runs[-1][2] == label and (bridge or begin - runs[-1][1] < width / 2):
            begin = runs.pop()[0]
        runs.append((begin, (i + 1) * width, label))
    return runs


def _seconds(report: Report) -> numpy.ndarray:
    """Modelled time at each place of the schedule, without asynchronous collectives."""
    slots, length = report.timing.slots, len(report.schedule.curve)
    begins: dict[int, float] = {length: end_of_last(slots)}
    for slot in slots:
        if not slot.asynchronous:
            begins[slot.index] = min(slot.begin, begins.get(slot.index, slot.begin))
    index = sorted(begins)
    times = numpy.maximum.accumulate([begins[i] for i in index])
    return numpy.interp(numpy.arange(length), index, times)


def trace(timelines: Mapping[str, Sequence[Slot]], report: Report) -> str:
    """Timelines by name, each as a process of Chrome's trace event format, and HBM in use."""
    events: list[dict[str, Any]] = []

    def name_row(kind: str, name: str, **where: int) -> None:
        events.append({"ph": "M", "name": kind, "args": {"name": name}, **where})

    for pid, (name, slots) in enumerate(timelines.items()):
        name_row("process_name", name, pid=pid)
        lanes = dict.fromkeys(("compute", "collective", *(slot.lane for slot in slots)))
        rows = {lane: tid for tid, lane in enumerate(lanes)}
        for lane, tid in rows.items():
            name_row("thread_name", lane, pid=pid, tid=tid)
        for number, slot in enumerate(slots):
            begin, end = 1e6 * slot.begin, 1e6 * slot.end  # microseconds
            args: dict[str, Any] = {"module": slot.module, "phase": slot.phase}
            args |= {"place": slot.index, "recomputed": slot.recomputed}
            where = {"pid": pid, "tid": rows[slot.lane], "cat": slot.lane, "name": slot.label}
            # Asynchronous collectives may overlap, so each has its own row.
            if slot.asynchronous and slot.lane == "collective":
                events.append({**where, "ph": "b", "id": number, "ts": begin, "args": args})
                events.append({**where, "ph": "e", "id": number, "ts": end})
            else:
                events.append({**where, "ph": "X", "ts": begin, "dur": end - begin, "args": args})
    if report.schedule.curve and not why_no_pictures(report):
        spots, stack = hbm(report)
        for number, at in enumerate(1e6 * _seconds(report)[spots]):
            args = {purpose: float(values[number]) / GIB for purpose, values in stack.items()}
            events.append({"ph": "C", "pid": 0, "name": "HBM in use, GiB", "ts": at, "args": args})
    return json.dumps({"traceEvents": events})
