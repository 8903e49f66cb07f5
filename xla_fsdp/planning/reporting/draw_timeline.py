"""The picture of a step's modelled timeline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy

from .amounts import GIB, milliseconds
from .curve import hbm
from .drawing import blocks, clean, heading, held, limits
from .lanes import LANES, MODULE, duration, lane_name, lanes
from .palette import COLORS, CURVE, legend
from .spans import Span
from .text import missing

if TYPE_CHECKING:
    from .report import Report

_ROOM = 190  # characters along the axis


def draw_timeline(report: Report, figure: Any) -> None:
    """Modules, compute, collectives and HBM in use over the modelled time of a step."""
    timing = report.timing
    if missing(report):
        heading(figure, 0.965, missing(report))
        return
    heading(
        figure,
        0.965,
        f"Timeline of one step (modelled, not measured): {milliseconds(timing.step, 1)}, of which "
        f"{milliseconds(timing.exposed, 1)} wait for collectives; MFU {timing.mfu:.0%}",
    )
    axes = figure.add_axes((0.085, 0.43, 0.905, 0.42))
    below = figure.add_axes((0.085, 0.1, 0.905, 0.29), sharex=axes)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="x", labelbottom=False, length=0)
    _draw_lanes(report, axes)
    below.set_xlabel("modelled time, ms")
    below.set_ylabel("HBM in use,\nGiB a device")
    clean(below)
    curve, total = hbm(report), 1e3 * duration(report)
    x, y = numpy.append(1e3 * curve.seconds, total), held(curve.total) / GIB
    below.fill_between(x, y, step="post", color=CURVE, linewidth=0)
    below.plot(x, y, color="black", linewidth=0.9, drawstyle="steps-post")
    limits(below, report, total, float(x[int(numpy.argmax(y))]))


def _draw_lanes(report: Report, axes: Any) -> None:
    room = _ROOM / (1e3 * duration(report))
    found = {
        lane: [replace(s, begin=1e3 * s.begin, end=1e3 * s.end) for s in spans]
        for lane, spans in lanes(report).items()
    }
    blocks(axes, found[MODULE], 3.1, room, "black")
    if not found[MODULE]:
        axes.text(0, 3.5, "  the program names no modules", va="center", color="#666666")
    rows = LANES[::-1]
    for row, lane in enumerate(rows[:-1]):
        _draw_bars(axes, row, found[lane])
    names = ["\n".join(lane_name(lane, found[lane], room)) for lane in rows]
    axes.set_yticks([0.42, 1.42, 2.42, 3.5], names)
    axes.set_ylim(-0.1, 4)
    from matplotlib.patches import Patch

    present = {s.kind for lane in rows[:-1] for s in found[lane]}
    patches = [Patch(color=color, label=name) for name, color in legend(present)]
    box = {"loc": "lower left", "bbox_to_anchor": (-0.008, 0.99), "frameon": False}
    axes.legend(handles=patches, ncols=max(len(patches), 1), **box)


def _draw_bars(axes: Any, row: int, spans: list[Span]) -> None:
    for kind, height in sorted({(s.kind, s.height) for s in spans}):
        alike = [s for s in spans if (s.kind, s.height) == (kind, height)]
        bars = [(s.begin, s.end - s.begin) for s in alike]
        color, width = COLORS[kind], 0.4 if height == 1 else 0
        axes.broken_barh(bars, (row, 0.85 * height), color=color, linewidth=width)
