"""Stretches of an axis, of time or of places, thinned out to what can be drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DETAIL = 1500  # pieces a picture, about one a pixel
_BINS = 300  # for spans more than can be drawn


@dataclass(frozen=True)
class Span:
    """Something drawn from ``begin`` to ``end`` (seconds, or places): one slot or several."""

    begin: float
    end: float
    kind: str
    label: str
    busy: float = 0.0  # without the gaps inside
    count: int = 1
    height: float = 1.0  # of the lane


def merge(spans: Iterable[Span], least: float) -> list[Span]:
    """Join neighbours that touch and are alike, and whatever is too short or near to be drawn.

    What is shorter than ``least`` takes in its successor; the busier of the two names the result.
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: s.begin):
        last = merged[-1] if merged else None
        close = last is not None and span.begin - last.end < least / 2
        speck = close and last.end - last.begin < least
        if close and (speck or (last.kind, last.label) == (span.kind, span.label)):
            main = last if last.busy >= span.busy else span
            merged[-1] = Span(
                last.begin,
                max(last.end, span.end),
                main.kind,
                main.label,
                last.busy + span.busy,
                last.count + span.count,
            )
        else:
            merged.append(span)
    return merged


def thinned(spans: list[Span], total: float) -> list[Span]:
    """The spans of one kind, each to be seen; or which share of the time they take, if too many."""
    if _crowded(spans, total):
        return _binned(spans, total)
    return merge(spans, total / DETAIL)


def _crowded(spans: list[Span], total: float) -> bool:
    """Whether the spans are too many and too short for what they are: each is drawn at least a
    pixel wide, and hundreds would look like a lane that is always busy.
    """
    drawn = sum(max(s.end - s.begin, total / DETAIL) for s in spans)
    return drawn > 0.2 * total and drawn > 3 * sum(s.busy for s in spans)


def _binned(spans: list[Span], total: float) -> list[Span]:
    """Which share of the time the spans take, bin by bin, as the height of what is drawn."""
    width = total / _BINS
    busy, number = [0.0] * (_BINS + 1), [0] * (_BINS + 1)
    for span in spans:
        first = int(span.begin / width)
        number[first] += 1
        for i in range(first, min(int(span.end / width), _BINS) + 1):
            busy[i] += max(min(span.end, (i + 1) * width) - max(span.begin, i * width), 0.0)
    kind, bins = spans[0].kind, []
    for i in (i for i in range(_BINS) if busy[i]):
        part = min(busy[i] / width, 1.0)
        label = f"{number[i]} start here, {part:.0%} of the time"
        bins.append(Span(i * width, (i + 1) * width, kind, label, busy[i], 1, max(part, 0.04)))
    return bins
