"""Pictures of a report as PNG, with matplotlib: what is drawn where.

On a canvas of its own, without the global state of pyplot: several threads may draw at once.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from .draw_memory import draw_memory, memory_height
from .draw_timeline import draw_timeline
from .text import missing

if TYPE_CHECKING:
    from .report import Report

_WIDTH, _TIMELINE = 15, 6.1  # inches


def picture(report: Report) -> bytes:
    """PNG, 1650 pixels wide: HBM over the schedule, and below it the timeline of the step.

    What the compiler did not get to is left out, and the picture says so.

    Raises:
        ImportError: there is no matplotlib.
    """
    if missing(report):
        return memory_picture(report)
    heights = memory_height(report), _TIMELINE
    figure = _figure(sum(heights))
    upper, lower = figure.subfigures(2, 1, height_ratios=heights)
    draw_memory(report, upper, heights[0])
    draw_timeline(report, lower)
    return _png(figure)


def memory_picture(report: Report) -> bytes:
    """PNG: HBM in use over the schedule by purpose, and the ten largest buffers at its peak."""
    height = memory_height(report)
    figure = _figure(height)
    draw_memory(report, figure, height)
    return _png(figure)


def timeline_picture(report: Report) -> bytes:
    """PNG: modules, compute, collectives and HBM in use over the modelled time of a step."""
    figure = _figure(_TIMELINE)
    draw_timeline(report, figure)
    return _png(figure)


def _figure(height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "a PNG needs matplotlib: pip install 'xla_fsdp[plan]' (or plot to .html)"
        raise ImportError(message) from error
    figure = Figure(figsize=(_WIDTH, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
