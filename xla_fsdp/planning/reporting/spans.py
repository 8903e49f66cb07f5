"""Intervals of an axis (of time or of places), merged so that a picture can show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

DETAIL = 1500  # intervals in a picture, about one per pixel
_SHARES = 300  # bins of an axis with too many spans to draw each
_WINNERS = 750  # bins; each shows only its busiest label
_LEGIBLE = 1.3 / 190  # the share of the axis that a number needs


@dataclass(frozen=True)
class Span:
    """One slot or several, plotted from ``begin`` to ``end`` (seconds or places)."""

    begin: float
    end: float
    kind: str
    label: str
    busy: float = 0.0  # its length without gaps
    count: int = 1
    height: float = 1.0  # of the lane


def merge(spans: Iterable[Span], least: float) -> list[Span]:
    """Join adjacent spans with the same label, and spans that are too short or too close to draw.

    A span shorter than ``least`` is joined with its successor; the result has the label of the
    busier one.
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: s.begin):
        if not merged or not _joins(merged[-1], span, least):
            merged.append(span)
            continue
        last = merged[-1]
        merged[-1] = replace(
            last if last.busy >= span.busy else span,
            begin=last.begin,
            end=max(last.end, span.end),
            busy=last.busy + span.busy,
            count=last.count + span.count,
        )
    return merged


def _joins(last: Span, span: Span, least: float) -> bool:
    if span.begin - last.end >= least / 2:
        return False
    return last.end - last.begin < least or (last.kind, last.label) == (span.kind, span.label)


def thinned(spans: list[Span], total: float) -> list[Span]:
    """The spans of one kind; if there are too many, their share of the time in bins."""
    # Each span is at least one pixel wide, so hundreds would look like a lane that is always busy.
    drawn = sum(max(s.end - s.begin, total / DETAIL) for s in spans)
    if drawn <= 0.2 * total or drawn <= 3 * sum(s.busy for s in spans):
        return merge(spans, total / DETAIL)
    width = total / _SHARES
    busy, number = [0.0] * _SHARES, [0] * _SHARES
    for span in spans:
        number[min(int(span.begin / width), _SHARES - 1)] += 1
        for i, inside in _parts(span, width, _SHARES):
            busy[i] += inside
    bins = []
    for i in (i for i in range(_SHARES) if busy[i]):
        part = min(busy[i] / width, 1.0)
        label = f"{number[i]} start here, {part:.0%} of the time"
        edges = i * width, (i + 1) * width
        bins.append(Span(*edges, spans[0].kind, label, busy[i], 1, max(part, 0.04)))
    return bins


def blocks(spans: list[Span], total: float, speck: float = _LEGIBLE) -> list[Span]:
    """The busiest label of each bin, so that single operations of another unit do not show.

    Gaps (collectives) between spans of one unit are filled. Spans that are busy for less than
    ``speck`` of ``total`` are left out.
    """
    runs = _joined(_winners(spans, total))
    return _joined(r for r in runs if r.busy >= speck * total)


def by_unit(spans: list[Span], total: float) -> list[Span]:
    """Blocks of spans labelled by unit.

    If most units are too narrow for a number, the label is that of their parent (``blocks`` for
    ``blocks.300``).
    """
    found = blocks(spans, total)
    if 2 * sum(s.busy for s in found) >= sum(s.busy for s in spans):
        return found
    return blocks([replace(s, label=_holder(s.label) or s.label) for s in spans], total)


def captions(spans: list[Span], room: float) -> list[tuple[Span, str]]:
    """Names for a row of spans; ``room``: characters that fit in one unit of their axis.

    A name wider than its span is shortened to its last component. A number may be wider than its
    span by half if it does not touch the one before. Otherwise there is no name.
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
    """The parent of the units that ``captions`` shortens to numbers; "" if fewer than half."""
    named = [(span.label, text) for span, text in captions(spans, room) if text]
    cut = Counter(_holder(label) for label, text in named if text.isdigit() and text != label)
    (inside, _), *_ = cut.most_common(1) or [("", 0)]
    return inside if 2 * cut.total() > len(named) else ""


def _holder(unit: str) -> str:
    """The parent of a unit: ``blocks`` for ``blocks.3``, "" at the top level."""
    return unit.rpartition(".")[0]


def _winners(spans: Iterable[Span], total: float) -> list[Span]:
    """The busiest label of every bin that has one."""
    width = total / _WINNERS or 1.0
    busy: list[dict[tuple[str, str], float]] = [{} for _ in range(_WINNERS)]
    for span in spans:
        key, length = (span.kind, span.label), span.end - span.begin
        for i, inside in _parts(span, width, _WINNERS):
            part = inside / length if length else 1.0
            busy[i][key] = busy[i].get(key, 0.0) + part * span.busy
    found = []
    for i, shares in enumerate(busy):
        if shares:
            kind, label = max(shares, key=lambda key: shares[key])
            found.append(Span(i * width, (i + 1) * width, kind, label, shares[kind, label]))
    return found


def _parts(span: Span, width: float, bins: int) -> Iterator[tuple[int, float]]:
    """Yield the bins that a span touches, with the length of the span inside each."""
    for i in range(
        min(int(span.begin / width), bins - 1), min(int(span.end / width), bins - 1) + 1
    ):
        yield i, max(min(span.end, (i + 1) * width) - max(span.begin, i * width), 0.0)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Join adjacent spans of one label, including the gap between them."""
    runs: list[Span] = []
    for span in spans:
        if runs and (runs[-1].kind, runs[-1].label) == (span.kind, span.label):
            last = runs[-1]
            runs[-1] = replace(last, end=span.end, busy=last.busy + span.busy)
        else:
            runs.append(span)
    return runs
