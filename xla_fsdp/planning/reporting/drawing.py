"""Draw with matplotlib: figures as PNG and as SVG, and elements that all pictures use.

It does not use the global state of pyplot and rcParams, so several threads may draw concurrently.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import RendererSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from .amounts import GIB
from .findings import Findings
from .series import COLORS, ceiling
from .spans import Span, captions

AREA = "area"  # the class of the elements over which a page shows the values of the curve
MODULE_COLOR = "#DDE3EA"
_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
_ANCHORS = {"left": (0.0, "start"), "center": (0.5, "middle"), "right": (1.0, "end")}


def canvas(width: float, height: float) -> Figure:
    """An empty figure with this size in inches."""
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an SVG element for a page; it contains no references."""
    figure.set_dpi(72)  # a unit of SVG is a point
    stream = io.StringIO()
    nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    size = figure.get_size_inches() * 72
    renderer = _Renderer(size[0], size[1], stream, metadata=nobody)
    figure.draw(renderer)
    renderer.finalize()
    written = stream.getvalue()
    return written[written.index("<svg") :]


class _Renderer(RendererSVG):
    """Writes words as text, and what the script of a page uses: the url of an artist as the text at
    the pointer (``data-t``), and its gid as a class."""

    draw_markers = (
        RendererBase.draw_markers
    )  # draws each marker instead of referring to a definition

    def open_group(self, s: str, gid: str | None = None) -> None:
        self.writer.start("g", {"class": gid} if gid else {})

    def draw_path(self, gc: Any, path: Any, transform: Any, rgbFace: Any = None) -> None:
        tip = gc.get_url()
        gc.set_url(None)
        gc.set_clip_rectangle(None)  # nothing is outside of its axes
        gc.set_clip_path(None)
        if tip is None:
            super().draw_path(gc, path, transform, rgbFace)
            return
        self.writer.start("g", {"data-t": tip})
        super().draw_path(gc, path, transform, rgbFace)
        self.writer.end("g")

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False,
        mtext: Any = None,
    ) -> None:  # fmt: skip
        # matplotlib positioned the line for its own font. If a browser uses another font, the
        # aligned end of the line keeps its position.
        part, anchor = _ANCHORS[mtext.get_horizontalalignment() if mtext else "center"]
        along = part * self.get_text_width_height_descent(s, prop, False)[0]
        x += along * math.cos(math.radians(angle))
        y -= along * math.sin(math.radians(angle))
        place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
        if angle:
            place["transform"] = f"rotate({-angle:g} {x:.1f} {y:.1f})"
        style = {"font-size": f"{prop.get_size_in_points():g}", "fill": to_hex(gc.get_rgb())}
        if prop.get_weight() == "bold":
            style["font-weight"] = "bold"
        self.writer.element("text", s, {**place, **style})


def plain(text: str) -> dict[str, Any]:
    """Arguments for text from users: no formulas, no characters that the font lacks."""
    return {"s": known(text), "parse_math": False}


def known(text: str) -> str:
    """``text`` in one line; characters that matplotlib's font lacks are escaped."""
    text = text.replace("\n", " ")
    return "".join(
        c if c in "…×–" or (c < "\u0250" and c.isprintable()) else ascii(c)[1:-1] for c in text
    )


def clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)


def held(values: numpy.ndarray) -> numpy.ndarray:
    """The values with the last one repeated, for the right end of a step curve."""
    return numpy.append(values, values[-1])


def limits(axes: Axes, report: Findings, x: float, at: float) -> None:
    """Draw capacity and peak. ``x``: the right end of the axis; ``at``: the place of the peak."""
    top, shown = ceiling(report)
    axes.set_xlim(0, x)
    axes.set_ylim(0, top / GIB)
    axes.xaxis.set_major_formatter("{x:,g}")
    capacity, side = report.hbm_capacity / GIB, "left" if at < 0.7 * x else "right"
    style: dict[str, Any] = {"fontsize": 10, "weight": "bold", "bbox": _BOX}
    style["color"] = COLORS["capacity"]
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
    style |= {"ha": side, "va": "bottom", "fontsize": 11, "color": "black"}
    away = 0.012 * x if side == "left" else -0.012 * x
    axes.text(at + away, peak + 0.03 * top / GIB, f"peak {peak:.2f} GiB", **style)


def room(axes: Axes, end: float) -> float:
    """The number of characters that fit in one unit of an axis from 0 to ``end``."""
    return 14 * axes.bbox.width / axes.figure.dpi / end


def named_row(axes: Axes, spans: list[Span], y: float, end: float, ink: str) -> None:
    """Draw a row of named blocks at ``y``: grey if ``ink`` is black, else in their colours."""
    colors = [MODULE_COLOR if ink == "black" else COLORS[span.kind] for span in spans]
    tips = [s.label if s.kind == s.label else f"{s.label}\n{s.kind}" for s in spans]
    bars = [(span.begin, span.end - span.begin) for span in spans]
    axes.broken_barh(bars, (y, 0.8), facecolors=colors, edgecolor="white", urls=tips)
    for span, text in captions(spans, room(axes, end)):
        middle = (span.begin + span.end) / 2
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5, "color": ink}
        axes.text(middle, y + 0.38, **plain(text), **style)
