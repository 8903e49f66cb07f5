"""Rows of named blocks: which unit, or which phase, a stretch of an axis belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from .spans import Span

_BINS = 750  # along the axis; in each, what is busiest counts
_LEGIBLE = 1.3 / 190  # of the axis: room for a number


def blocks(spans: list[Span], total: float, speck: float = _LEGIBLE) -> list[Span]:
    """What is busiest, stretch by stretch: the odd operation of another unit does not show.

    Gaps between neighbours of one unit (collectives) are bridged. What is busy for less than
    ``speck`` of ``total`` is left out.
    """
    runs = _joined(_winners(spans, total))
    return _joined(r for r in runs if r.busy >= speck * total)


def by_unit(spans: list[Span], total: float) -> list[Span]:
    """Blocks of spans labelled by unit; by what holds the units (``blocks`` for ``blocks.300``) if
    most of the time is in units too narrow for a number.
    """
    found = blocks(spans, total)
    if 2 * sum(s.busy for s in found) >= sum(s.busy for s in spans):
        return found
    return blocks([replace(s, label=holder(s.label) or s.label) for s in spans], total)


def holder(unit: str) -> str:
    """``blocks`` of ``blocks.3``; "" of a unit at the top."""
    return unit.rpartition(".")[0]


def captions(spans: list[Span], room: float) -> list[tuple[Span, str]]:
    """Names for a row of spans, ``room`` characters in a unit of their axis.

    A name wider than its span is cut to its last component. A number may stick out by half, as
    long as it keeps away from the one before; else there is no name.
    """
    found, last = [], -1.0
    for span in spans:
        width, middle = (span.end - span.begin) * room, (span.begin + span.end) / 2 * room
        tail = span.label.rpartition(".")[2]
        text = span.label if len(span.label) <= width else tail
        fits = len(text) <= (1.6 * width if text.isdigit() else width)
        if fits and middle - len(text) / 2 >= last + 0.9:
            last = middle + len(text) / 2
        else:
            text = ""
        found.append((span, text))
    return found


def numbered(spans: list[Span], room: float) -> str:
    """What holds the units that ``captions`` cuts to their number; "" if it cuts less than half."""
    named = [(span.label, text) for span, text in captions(spans, room) if text]
    cut = Counter(holder(label) for label, text in named if text.isdigit() and text != label)
    (inside, _), *_ = cut.most_common(1) or [("", 0)]
    return inside if 2 * cut.total() > len(named) else ""


def _winners(spans: Iterable[Span], total: float) -> list[Span]:
    """The busiest label of every bin that has one."""
    width = total / _BINS or 1.0
    busy: list[Counter[tuple[str, str]]] = [Counter() for _ in range(_BINS)]
    for span in spans:
        first, length = min(int(span.begin / width), _BINS - 1), span.end - span.begin
        for i in range(first, min(int(span.end / width), _BINS - 1) + 1):
            inside = min(span.end, (i + 1) * width) - max(span.begin, i * width)
            part = inside / length if length else 1.0
            busy[i][span.kind, span.label] += max(part, 0.0) * span.busy
    found = []
    for i, counts in enumerate(busy):
        if counts:
            (kind, label), most = counts.most_common(1)[0]
            found.append(Span(i * width, (i + 1) * width, kind, label, most))
    return found


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one label as one, whatever gap is between them."""
    runs: list[Span] = []
    for span in spans:
        if runs and (runs[-1].kind, runs[-1].label) == (span.kind, span.label):
            last = runs[-1]
            runs[-1] = replace(last, end=span.end, busy=last.busy + span.busy)
        else:
            runs.append(span)
    return runs
