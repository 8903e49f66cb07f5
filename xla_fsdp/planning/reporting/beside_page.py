"""A plan's timeline and that of a trace, one above the other, as a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..recorded.trace import RecordedStep
from ..records import Slot
from .drawing import canvas, svg
from .findings import Findings
from .page import document, table
from .pictures import SIDES, draw_lanes
from .series import duration, timeline
from .tables import Section

_WIDTH, _HEIGHT = 12.5, 3.4  # inches, of each


def page(
    report: Findings,
    recorded: RecordedStep,
    verdict: str,
    notes: Sequence[str],
    sections: Sequence[Section],
) -> str:
    """The whole page. Every text is escaped."""
    parts = [f"<h1>{escape(verdict)}</h1>"]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    modelled, measured = 1e3 * duration(report), _end(recorded.slots)
    # Of the same kind of device a millisecond is as long in both.
    common = max(modelled, measured) if not recorded.on_cpu else 0.0
    for heading, slots, end in (
        ("Modelled", report.timing.slots, modelled),
        (f"Measured: step {recorded.number + 1} of {recorded.steps}", recorded.slots, measured),
    ):
        parts += [f"<h2>{escape(heading)}</h2>"]
        parts += [f'<div data-axis="ms">{_timeline(slots, common or end)}</div>']
    tables = "".join(table(section) for section in sections)
    parts += [f'<div class="tables">{tables}</div>']
    title = f"{report.title or 'xla_fsdp plan'} and {recorded.device}"
    return document(title, parts, {})


def _end(slots: Sequence[Slot]) -> float:
    return 1e3 * max((slot.end for slot in slots), default=0.0)


def _timeline(slots: Sequence[Slot], end: float) -> str:
    figure = canvas(_WIDTH, _HEIGHT)
    axes = figure.add_axes((SIDES[0], 0.14, SIDES[1] - SIDES[0], 0.74))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, end)
    axes.set_xlabel("ms")
    draw_lanes(axes, timeline(slots, end), end)
    return svg(figure)
