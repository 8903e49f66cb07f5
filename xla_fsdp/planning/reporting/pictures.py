"""The pictures of a report: HBM over the schedule, and the timeline of a step."""

from __future__ import annotations

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch

from ..records import Buffer
from .amounts import GIB, MIB, milliseconds, short
from .drawing import AREA, canvas, clean, held, known, limits, named_row, plain, png, room, svg
from .findings import Findings
from .series import (
    ASYNCHRONOUS,
    COLORS,
    KINDS,
    LANES,
    MODULE,
    SYNCHRONOUS,
    caption,
    duration,
    hbm,
    lane_name,
    lanes,
    phases,
    purposes,
)
from .spans import Span
from .text import missing, reason

SIDES = (0.1, 0.99)  # left and right ends of the axes on a page, as parts of its width
_PNG, _PAGE = 15, 12.5  # inches wide
_TIMELINE = 6.1  # inches high
_LINE = 0.27  # inches, of the text above the axes
_NAME = 84  # characters above a bar
_GREEN, _RED, _GREY, _CURVE = "#00694F", "#B03A00", "#444444", "#9DB4C8"
_CALLED = {
    "": "other compute",
    SYNCHRONOUS: "synchronous collective: compute waits",
    ASYNCHRONOUS: "asynchronous: compute continues",
}


def picture(report: Findings) -> bytes:
    """PNG, 1650 pixels wide: HBM over the schedule, and below it the timeline of the step.

    A part that the compiler did not compute is left out, with a message in the picture.
    """
    if missing(report):
        return memory_picture(report)
    height = _memory_height(report)
    figure = canvas(_PNG, height + _TIMELINE)
    heights = (height, _TIMELINE)
    (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
    _draw_memory(report, upper, height)
    _draw_timeline(report, lower)
    return png(figure)


def memory_picture(report: Findings) -> bytes:
    """PNG: HBM in use over the schedule by purpose, and the ten largest buffers at its peak."""
    height = _memory_height(report)
    figure = canvas(_PNG, height)
    _draw_memory(report, figure, height)
    return png(figure)


def timeline_picture(report: Findings) -> bytes:
    """PNG: modules, compute, collectives and HBM in use over the modelled time of a step."""
    figure = canvas(_PNG, _TIMELINE)
    _draw_timeline(report, figure)
    return png(figure)


def memory_svg(report: Findings) -> str:
    """SVG for a page: HBM in use over the schedule by purpose."""
    figure = canvas(_PAGE, 4.2)
    _draw_curve(report, figure.add_axes((SIDES[0], 0.12, SIDES[1] - SIDES[0], 0.74)))
    return svg(figure)


def timeline_svg(report: Findings) -> str:
    """SVG for a page: what ``timeline_picture`` shows."""
    figure = canvas(_PAGE, 4.8)
    _draw_lanes_and_curve(report, figure, SIDES[0], 0.92)
    return svg(figure)


def _memory_height(report: Findings) -> float:
    """The height of the picture of memory, in inches."""
    return (5.1 if report.schedule.curve else 0.6) + _LINE * len(_lines(report))


def _lines(report: Findings) -> list[tuple[str, str]]:
    """The lines of text below the verdict, with their colours."""
    lines = [(caption(report), _GREY), (reason(report), _RED), (missing(report), _GREY)]
    return [(text, color) for text, color in lines if text]


def _draw_memory(report: Findings, figure: FigureBase, height: float) -> None:
    """Draw on a figure that is ``height`` inches high."""
    _heading(figure, 1 - 0.19 / height, report.verdict, _GREEN if report.fits else _RED)
    below = 0.53
    for text, color in _lines(report):
        place = 0.012, 1 - below / height
        figure.text(*place, **plain(text), fontsize=9.5, va="top", color=color)
        below += _LINE
    if not report.schedule.curve:
        return
    bottom, top = 0.66 / height, 1 - (below + 0.52) / height
    _draw_curve(report, figure.add_axes((0.055, bottom, 0.545, top - bottom)))
    top -= 0.27 / height  # below the legend, which is as wide as the figure
    _draw_largest(report, figure.add_axes((0.635, bottom, 0.355, top - bottom)))


def _heading(figure: FigureBase, y: float, text: str, color: str = "black") -> None:
    figure.text(0.012, y, **plain(text), fontsize=14, weight="bold", va="top", color=color)


def _draw_curve(report: Findings, axes: Axes) -> None:
    length = max(report.schedule.length, 1)
    axes.set_xlabel(f"place in the compiled schedule (of {length:,} instructions)")
    axes.set_ylabel("HBM in use, GiB a device")
    clean(axes)
    curve = hbm(report)
    names = list(curve.stack)
    colors = [COLORS[n] for n in names]
    values = [held(curve.stack[n]) / GIB for n in names]
    x = numpy.append(curve.places, length)
    axes.stackplot(x, values, labels=names, colors=colors, step="post", linewidth=0, gid=AREA)
    axes.plot(x, held(curve.total) / GIB, color="black", linewidth=0.9, drawstyle="steps-post")
    limits(axes, report, length, report.schedule.peak_index)
    strip = axes.inset_axes((0, 1.0, 1, 0.06), sharex=axes)
    strip.set_axis_off()
    strip.set_ylim(0, 1)
    named_row(strip, phases(report), 0, length, "white")
    style = {"frameon": False, "handlelength": 1.3, "columnspacing": 1.3, "fontsize": 9.5}
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.06), ncols=len(names), **style)


def _draw_largest(report: Findings, axes: Axes) -> None:
    """Draw the ten largest buffers as bars with their names."""
    live = report.schedule.live_at_peak()[:10]
    colors = {b: COLORS[name] for name, some in purposes(report.schedule).items() for b in some}
    axes.set_title("Ten largest buffers live at the peak", loc="left", fontsize=11, weight="bold")
    axes.set_xlabel("MiB a device")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_yticks([])
    for row, buffer in enumerate(live):
        axes.barh(row + 0.38, buffer.bytes / MIB, 0.3, color=colors[buffer])
        size = f"{buffer.bytes / MIB:,.1f} MiB   {short(buffer.shape, 30)}   "
        text = plain(size + _named(buffer, _NAME - len(size)))
        axes.text(0, row, **text, fontsize=8.5, va="center")
    axes.set_ylim(9.7, -0.4)
    axes.set_xlim(left=0)


def _named(buffer: Buffer, most: int) -> str:
    """The name of an argument; for another buffer, its operation and module."""
    if buffer.category == "argument":
        return short(f"argument {buffer.name}", most)
    module = short(buffer.module, max(most - len(buffer.opcode) - 2, 8))
    return ", ".join(x for x in (short(buffer.opcode, 20), module) if x)


def _draw_timeline(report: Findings, figure: FigureBase) -> None:
    timing = report.timing
    if missing(report):
        _heading(figure, 0.965, missing(report))
        return
    _heading(
        figure,
        0.965,
        f"Timeline of one step (modelled, not measured): {milliseconds(timing.step, 1)}, of which "
        f"{milliseconds(timing.exposed, 1)} wait for collectives; MFU {timing.mfu:.0%}",
    )
    _draw_lanes_and_curve(report, figure, 0.085, 0.85)


def _draw_lanes_and_curve(report: Findings, figure: FigureBase, left: float, top: float) -> None:
    """Draw on the part of a figure right of ``left`` and below ``top``."""
    width = SIDES[1] - left
    axes = figure.add_axes((left, 0.43, width, top - 0.43))
    below = figure.add_axes((left, 0.1, width, 0.29), sharex=axes)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="x", labelbottom=False, length=0)
    draw_lanes(axes, lanes(report), 1e3 * duration(report))
    below.set_xlabel("modelled time, ms")
    below.set_ylabel("HBM in use,\nGiB a device")
    clean(below)
    curve, total = hbm(report), 1e3 * duration(report)
    x, y = numpy.append(1e3 * curve.seconds, total), held(curve.total) / GIB
    below.fill_between(x, y, step="post", color=_CURVE, linewidth=0, gid=AREA)
    below.plot(x, y, color="black", linewidth=0.9, drawstyle="steps-post")
    limits(below, report, total, float(x[int(numpy.argmax(y))]))


def draw_lanes(axes: Axes, found: dict[str, list[Span]], end: float) -> None:
    """Draw the lanes of a timeline that is ``end`` milliseconds long."""
    named_row(axes, found[MODULE], 3.1, end, "black")
    if not found[MODULE]:
        axes.text(0, 3.5, "  the program has no module names", va="center", color="#666666")
    rows = LANES[::-1]
    for row, lane in enumerate(rows[:-1]):
        _draw_bars(axes, row, found[lane])
    names = [lane_name(lane, found[lane], room(axes, end)) for lane in rows]
    words = ["\n".join(map(known, lines)) for lines in names]
    axes.set_yticks([0.42, 1.42, 2.42, 3.5], words, parse_math=False)
    axes.set_ylim(-0.1, 4)
    present = {s.kind for lane in rows[:-1] for s in found[lane]}
    kinds = [kind for kind in KINDS if kind in present]
    patches = [Patch(color=COLORS[kind], label=_CALLED.get(kind, kind)) for kind in kinds]
    axes.legend(
        handles=patches, ncols=max(len(patches), 1), loc="lower left",
        bbox_to_anchor=(-0.008, 0.99), frameon=False,
    )  # fmt: skip


def _draw_bars(axes: Axes, row: int, spans: list[Span]) -> None:
    for kind, height in sorted({(s.kind, s.height) for s in spans}):
        alike = [s for s in spans if (s.kind, s.height) == (kind, height)]
        bars = [(s.begin, s.end - s.begin) for s in alike]
        color, width = COLORS[kind], 0.4 if height == 1 else 0
        tips = [_tip(span) for span in alike]
        axes.broken_barh(bars, (row, 0.85 * height), color=color, linewidth=width, urls=tips)


def _tip(span: Span) -> str:
    label = span.label if span.count == 1 else f"{span.count} in a row, mostly {span.label}"
    return f"{label}\n{span.busy:.3f} ms from {span.begin:.3f} ms on"
