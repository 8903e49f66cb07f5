"""The pictures of the page, as SVG with tips for the pointer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from .amounts import GIB
from .blocks import captions
from .curve import Curve, ceiling
from .lanes import LANES, MODULE, duration, lane_name, lanes, phases
from .palette import COLORS, CURVE, legend
from .palette import MODULE as MODULE_COLOR
from .spans import Span

if TYPE_CHECKING:
    from .report import Report

WIDTH, LEFT, RIGHT = 1200, 110, 1180  # pixels: the pictures, and their axes inside


def memory_svg(report: Report, curve: Curve) -> str:
    """HBM in use over the schedule, stacked by purpose."""
    length = max(report.schedule.length, 1)
    axes = _Axes(60, 340, length, ceiling(report)[0] / GIB)
    parts = [_legend([(name, COLORS[name]) for name in curve.stack])]
    parts.append(_blocks(axes, phases(report), (38, 18), "#fff"))
    parts.append(axes.grid("HBM in use, GiB a device", f"place in the schedule (of {length:,})"))
    low = [0.0] * len(curve.places)
    for name, values in curve.stack.items():
        high = [a + float(b) / GIB for a, b in zip(low, values, strict=True)]
        parts.append(axes.area(curve.places, low, high, COLORS[name]))
        low = high
    parts.append(axes.limits(report, report.schedule.peak_index))
    return _svg(380, "places", parts)


def timeline_svg(report: Report, curve: Curve) -> str:
    """Modules, compute, collectives and HBM in use over the modelled time of a step."""
    total = 1e3 * duration(report) or 1.0
    axes = _Axes(238, 400, total, ceiling(report)[0] / GIB)
    found = {
        lane: [replace(s, begin=1e3 * s.begin, end=1e3 * s.end) for s in spans]
        for lane, spans in lanes(report).items()
    }
    present = {s.kind for lane in LANES if lane != MODULE for s in found[lane]}
    parts = [_legend(legend(present))]
    for lane, top in zip(LANES, (38, 78, 128, 178), strict=True):
        words = lane_name(lane, found[lane], axes.room())
        for row, word in enumerate(words):
            y = top + (19 if lane == MODULE else 25) + 14 * row - 7 * (len(words) - 1)
            parts.append(_text(LEFT - 8, y, word, 'text-anchor="end"'))
        if lane != MODULE:
            parts.append(_bars(axes, found[lane], (top, 42)))
        elif found[lane]:
            parts.append(_blocks(axes, found[lane], (top, 30), "#111"))
        else:
            parts.append(_text(LEFT + 8, top + 19, "the program names no modules", 'fill="#666"'))
    parts.append(axes.grid("HBM in use, GiB", "modelled time, ms"))
    x, high = 1e3 * curve.seconds, curve.total / GIB
    parts.append(axes.area(x, [0.0] * len(high), high, CURVE))
    parts.append(axes.limits(report, float(x[int(high.argmax())])))
    return _svg(440, "ms", parts)


@dataclass(frozen=True)
class _Axes:
    """Axes from ``top`` to ``bottom`` in pixels, over 0 to ``x_end`` and 0 to ``y_end``."""

    top: float
    bottom: float
    x_end: float
    y_end: float

    def x(self, value: float) -> float:
        return LEFT + (RIGHT - LEFT) * value / self.x_end

    def room(self) -> float:
        """Characters of a caption that find room in a unit of x."""
        return (RIGHT - LEFT) / 7.3 / self.x_end

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * value / self.y_end

    def grid(self, y_label: str, x_label: str) -> str:
        parts = []
        for tick in _ticks(self.y_end, 6):
            y = f"{self.y(tick):.1f}"
            parts.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke="#e4e4e4"/>')
            parts.append(_text(LEFT - 8, self.y(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
        for tick in _ticks(self.x_end, 10):
            x = self.x(tick)
            parts.append(f'<path d="M{x:.1f} {self.bottom}v5" stroke="#111"/>')
            parts.append(_text(x, self.bottom + 18, f"{tick:,g}", 'text-anchor="middle"'))
        middle = (self.top + self.bottom) / 2
        turned = f'text-anchor="middle" transform="rotate(-90 40 {middle:.0f})"'
        parts.append(_text(40, middle, y_label, turned))
        parts.append(_text((LEFT + RIGHT) / 2, self.bottom + 36, x_label, 'text-anchor="middle"'))
        parts.append(f'<path d="M{LEFT} {self.top}V{self.bottom}H{RIGHT}" class="axis" ')
        return "".join(parts) + 'fill="none" stroke="#111"/>'

    def area(self, places, low, high, color: str) -> str:
        """What lies between two step curves."""
        ends = [*places[1:], self.x_end]
        corners = list(zip(places, ends, low, high, strict=True))
        there = "".join(
            f"{self.x(a):.1f} {self.y(h):.1f}H{self.x(b):.1f}L" for a, b, _, h in corners
        )
        back = "L".join(
            f"{self.x(b):.1f} {self.y(lo):.1f}H{self.x(a):.1f}" for a, b, lo, _ in corners[::-1]
        )
        return f'<path class="area" fill="{color}" d="M{there}{back}Z"/>'

    def limits(self, report: Report, at: float) -> str:
        """The capacity, and the peak at ``at``; their words keep away from each other."""
        peak, capacity = max(report.schedule.curve) / GIB, report.hbm_capacity / GIB
        side, away = ("start", 10) if at < 0.7 * self.x_end else ("end", -10)
        red = COLORS["capacity"]
        free, x = ("end", RIGHT - 6) if side == "start" else ("start", LEFT + 6)
        if ceiling(report)[1]:
            y = self.y(capacity)
            line = f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{red}" '
            parts = [line + 'stroke-width="2" stroke-dasharray="7 4"/>']
            parts.append(_bold(x, y - 5, f"capacity {capacity:.2f} GiB", free, red))
        else:
            text = f"capacity {capacity:.2f} GiB: above this axis"
            parts = [_bold(x, self.top + 12, text, free, red)]
        x, y = self.x(at), self.y(peak)
        parts.append(f'<path d="M{x:.1f} {y:.1f}l-6 -10h12z" fill="#111"/>')
        parts.append(_bold(x + away, y - 4, f"peak {peak:.2f} GiB", side, "#111"))
        return "".join(parts)


def _svg(height: int, axis: str, parts: list[str]) -> str:
    """``axis`` is the list in the page's data that the pointer reads along x."""
    box = f'viewBox="0 0 {WIDTH} {height}" data-axis="{axis}" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _bold(x: float, y: float, text: str, anchor: str, color: str) -> str:
    """Bold text with a white edge, to be read on whatever is below it."""
    style = f'text-anchor="{anchor}" font-weight="bold" fill="{color}"'
    edge = f'{style} stroke="#fff" stroke-width="4"'
    return _text(x, y, text, edge) + _text(x, y, text, style)


def _rect(axes: _Axes, span: Span, rows: tuple[int, int], tip: str) -> str:
    """A span as a rectangle; ``rows`` are the top and the height of its lane."""
    x, width = axes.x(span.begin), max(axes.x(span.end) - axes.x(span.begin), 1.2)
    high = rows[1] * span.height
    place = f'x="{x:.1f}" y="{sum(rows) - high:.4g}" width="{width:.1f}" height="{high:.4g}"'
    return f'<rect {place} data-t="{escape(tip)}"/>'


def _bars(axes: _Axes, spans: list[Span], rows: tuple[int, int]) -> str:
    """A lane of the timeline, in the colours of its kinds."""
    by_color: dict[str, list[str]] = {}
    for span in spans:
        label = span.label if span.count == 1 else f"{span.count} in a row, mostly {span.label}"
        tip = f"{label}\n{1e3 * span.busy:.3f} ms from {span.begin:.3f} ms on"
        by_color.setdefault(COLORS[span.kind], []).append(_rect(axes, span, rows, tip))
    groups = (
        f'<g fill="{color}" stroke="{color}" stroke-width=".3">{"".join(rects)}</g>'
        for color, rects in by_color.items()
    )
    return "".join(groups)


def _blocks(axes: _Axes, spans: list[Span], rows: tuple[int, int], ink: str) -> str:
    """A row of named blocks: grey where the ink is dark, else in the colours of their kinds."""
    rects, names = [], []
    style = f'text-anchor="middle" fill="{ink}" font-size="12" pointer-events="none"'
    for span, text in captions(spans, axes.room()):
        color = COLORS[span.kind] if ink == "#fff" else MODULE_COLOR
        tip = f"{span.label}\n{span.kind}" if span.kind != span.label else span.label
        rects.append(f'<g fill="{color}" stroke="#fff">{_rect(axes, span, rows, tip)}</g>')
        middle = axes.x((span.begin + span.end) / 2)
        names += [_text(middle, rows[0] + rows[1] / 2 + 4, text, style)] if text else []
    return "".join(rects + names)


def _legend(entries: list[tuple[str, str]]) -> str:
    parts, x = [], LEFT
    for name, color in entries:
        parts.append(f'<rect x="{x}" y="8" width="20" height="12" fill="{color}"/>')
        parts.append(_text(x + 26, 19, name))
        x += 50 + int(7.8 * len(name))
    return "".join(parts)


def _ticks(end: float, most: int) -> list[float]:
    """Round numbers from 0 to at most ``end``."""
    rough = end / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [round(i * step, 10) for i in range(int(end / step) + 1)]
