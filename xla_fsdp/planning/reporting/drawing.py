"""What the matplotlib pictures of a report have in common: texts, axes of HBM, rows of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from .amounts import GIB
from .blocks import captions
from .curve import ceiling
from .palette import COLORS, MODULE
from .spans import Span

if TYPE_CHECKING:
    from .report import Report

GREEN, RED, GREY = "#00694F", "#B03A00", "#444444"
_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0}


def plain(text: str) -> dict[str, Any]:
    """Text of others in matplotlib's terms: no formulas, no characters its font lacks."""
    known = "".join(c if c < "\u0250" or c in "…×–" else ascii(c)[1:-1] for c in text)
    return {"s": known.replace("\n", " "), "parse_math": False}


def heading(figure: Any, y: float, text: str, color: str = "black") -> None:
    figure.text(0.012, y, **plain(text), fontsize=14, weight="bold", va="top", color=color)


def line(figure: Any, y: float, text: str, color: str = GREY) -> None:
    """A line below a heading."""
    figure.text(0.012, y, **plain(text), fontsize=9.5, va="top", color=color)


def clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)


def held(values: numpy.ndarray) -> numpy.ndarray:
    """The values with the last one again, for the right end of a curve of steps."""
    return numpy.append(values, values[-1])


def limits(axes: Any, report: Report, x: float, at: float) -> None:
    """The capacity and the peak: ``x`` is the right end of the axis, ``at`` the peak's place."""
    top, shown = ceiling(report)
    axes.set_xlim(0, x)
    axes.set_ylim(0, top / GIB)
    capacity, side = report.hbm_capacity / GIB, "left" if at < 0.7 * x else "right"
    style = {"color": COLORS["capacity"], "fontsize": 10, "weight": "bold", "bbox": _BOX}
    free = (0.006 * x, "left") if side == "right" else (0.994 * x, "right")  # away from the peak
    if shown:
        axes.axhline(capacity, color=COLORS["capacity"], linewidth=1.8, linestyle="--")
        y, text = capacity + 0.015 * top / GIB, f"capacity {capacity:.2f} GiB"
        axes.text(free[0], y, text, ha=free[1], va="bottom", **style)
    else:
        text = f"capacity {capacity:.2f} GiB: above this axis"
        axes.text(free[0], 0.97 * top / GIB, text, ha=free[1], va="top", **style)
    peak = max(report.schedule.curve) / GIB
    axes.plot([at], [peak], marker="v", markersize=8, color="black", clip_on=False)
    style = {"ha": side, "va": "bottom", "fontsize": 11, "weight": "bold", "bbox": _BOX}
    away = 0.012 * x if side == "left" else -0.012 * x
    axes.text(at + away, peak + 0.03 * top / GIB, f"peak {peak:.2f} GiB", **style)


def blocks(axes: Any, spans: list[Span], y: float, room: float, ink: str) -> None:
    """A row of named blocks; ``room`` is how many characters find room in a unit of x."""
    for span, text in captions(spans, room):
        color = MODULE if ink == "black" else COLORS[span.kind]
        bar = [(span.begin, span.end - span.begin)]
        axes.broken_barh(bar, (y, 0.8), facecolor=color, edgecolor="white")
        where = ((span.begin + span.end) / 2, y + 0.38)
        style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": ink}
        axes.text(*where, **plain(text), **style)
