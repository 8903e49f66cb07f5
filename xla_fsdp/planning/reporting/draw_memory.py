"""The picture of HBM: in use over the schedule, and the largest buffers at its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from .amounts import GIB, MIB, short
from .curve import explained, hbm, purposes
from .drawing import GREEN, GREY, RED, blocks, clean, heading, held, limits, line, plain
from .lanes import phases
from .palette import COLORS
from .text import missing, reason

if TYPE_CHECKING:
    from .report import Report

_LINE = 0.27  # inches, of the text above the axes
_ROOM = 84  # characters above a bar


def memory_height(report: Report) -> float:
    """Inches that the picture needs."""
    lines = len(_lines(report))
    return (5.1 if report.schedule.curve else 0.6) + _LINE * lines


def draw_memory(report: Report, figure: Any, height: float) -> None:
    """Draws on a figure of that many inches."""
    heading(figure, 1 - 0.19 / height, report.verdict, GREEN if report.fits else RED)
    below = 0.53
    for text, color in _lines(report):
        line(figure, 1 - below / height, text, color)
        below += _LINE
    if not report.schedule.curve:
        return
    bottom, top = 0.66 / height, 1 - (below + 0.52) / height
    _draw_curve(report, figure.add_axes((0.055, bottom, 0.545, top - bottom)))
    top -= 0.27 / height  # below the legend, which is as wide as the figure
    _draw_largest(report, figure.add_axes((0.635, bottom, 0.355, top - bottom)))


def _lines(report: Report) -> list[tuple[str, str]]:
    """What stands below the verdict, with the colour it has."""
    lines = [(explained(report), GREY), (reason(report), RED), (missing(report), GREY)]
    return [(text, color) for text, color in lines if text]


def _draw_curve(report: Report, axes: Any) -> None:
    length = report.schedule.length
    axes.set_xlabel(f"place in the compiled schedule (of {length:,} instructions)")
    axes.set_ylabel("HBM in use, GiB a device")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    clean(axes)
    curve = hbm(report)
    names = list(curve.stack)
    colors = [COLORS[n] for n in names]
    values = [held(curve.stack[n]) / GIB for n in names]
    x = numpy.append(curve.places, length)
    axes.stackplot(x, values, labels=names, colors=colors, step="post", linewidth=0)
    axes.plot(x, held(curve.total) / GIB, color="black", linewidth=0.9, drawstyle="steps-post")
    limits(axes, report, max(length, 1), report.schedule.peak_index)
    strip = axes.inset_axes((0, 1.0, 1, 0.06), sharex=axes)
    strip.set_axis_off()
    strip.set_ylim(0, 1)
    blocks(strip, phases(report), 0, 100 / max(length, 1), "white")
    style = {"frameon": False, "handlelength": 1.3, "columnspacing": 1.3, "fontsize": 9.5}
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.06), ncols=len(names), **style)


def _draw_largest(report: Report, axes: Any) -> None:
    """The ten largest buffers, as bars that carry their own names."""
    live = report.schedule.live_at_peak()[:10]
    colors = {b: COLORS[name] for name, some in purposes(report.schedule).items() for b in some}
    axes.set_title("Ten largest buffers live at the peak", loc="left", fontsize=11, weight="bold")
    axes.set_xlabel("MiB a device")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_yticks([])
    for row, buffer in enumerate(live):
        axes.barh(row + 0.38, buffer.bytes / MIB, 0.3, color=colors[buffer])
        size = f"{buffer.bytes / MIB:,.1f} MiB   {short(buffer.shape, 30)}   "
        axes.text(
            0, row, **plain(size + _named(buffer, _ROOM - len(size))), fontsize=8.5, va="center"
        )
    axes.set_ylim(9.7, -0.4)
    axes.set_xlim(left=0)


def _named(buffer: Any, most: int) -> str:
    """The name of an argument; of another buffer, what made it and in which module."""
    if buffer.category == "argument":
        return short(f"argument {buffer.name}", most)
    module = short(buffer.module, max(most - len(buffer.opcode) - 2, 8))
    return ", ".join(x for x in (short(buffer.opcode, 20), module) if x)
