"""Curves of the collectives, and the steps beside each other and their plans."""

from __future__ import annotations

from typing import Any

from ..planning.reporting.drawing import canvas, clean, svg
from .findings import Measured
from .records import CollectiveTime

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_OURS, _IN_TREE, _PLAN = "#0072B2", "#8A8A8A", "#E69F00"


def collectives_svg(found: Measured) -> str:
    """What a rank sends a second, by size: a panel a kind, a line an axis, dashed the model."""
    kinds = list(dict.fromkeys(time.kind for time in found.collectives))
    colors = dict(zip(dict.fromkeys(t.axis for t in found.collectives), _COLORS, strict=False))
    figure = canvas(12.5, 3.4)
    for number, kind in enumerate(kinds):
        width = 0.94 / len(kinds)
        axes = figure.add_axes((0.05 + number * width, 0.17, width - 0.05, 0.68))
        clean(axes)
        for axis, color in colors.items():
            some = sorted(
                (t for t in found.collectives if (t.kind, t.axis) == (kind, axis)),
                key=lambda time: time.bytes,
            )
            if some:
                _line(axes, some, color, axis)
        axes.set_title(kind, loc="left", fontsize=11, weight="bold")
        axes.set_xlabel("bytes")
        if number == 0:
            axes.set_ylabel("GB/s sent by a rank")
            axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    return svg(figure)


def _line(axes: Any, some: list[CollectiveTime], color: str, label: str) -> None:
    sizes = [time.bytes for time in some]
    speeds = [time.sent / time.seconds / 1e9 for time in some]
    axes.loglog(sizes, speeds, color=color, marker="o", markersize=4, label=label)
    modelled = [time.sent / time.modelled / 1e9 for time in some if time.modelled]
    if len(modelled) == len(sizes):
        axes.loglog(sizes, modelled, color=color, linestyle="--", linewidth=1)


def steps_svg(found: Measured) -> str:
    """Milliseconds of each step: ours, in-tree, planned."""
    names = list(dict.fromkeys(run.name for run in found.steps))
    figure = canvas(12.5, 0.6 + 0.9 * len(names))
    axes = figure.add_axes((0.1, 0.5 / (0.6 + 0.9 * len(names)), 0.86, 0.8))
    clean(axes)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    for row, name in enumerate(names):
        by_lane = {run.lane: run for run in found.steps if run.name == name}
        ours = by_lane.get("xla_fsdp")
        planned = None if ours is None or found.where.family == "cpu" else ours.planned
        bars = [
            ("xla_fsdp", None if ours is None else ours.seconds, _OURS),
            ("in-tree", by_lane["in-tree"].seconds if "in-tree" in by_lane else None, _IN_TREE),
            ("planned", planned, _PLAN),
        ]
        for place, (label, seconds, color) in enumerate(bars):
            if seconds is not None:
                y = row + 0.27 * (place - 1)
                axes.barh(y, 1e3 * seconds, 0.24, color=color, label=label if row == 0 else None)
                axes.text(1e3 * seconds, y, f" {1e3 * seconds:.2f}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    axes.margins(x=0.1)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    return svg(figure)
