"""The report of a verification: as text, as JSON, and as one HTML page.

Only the page needs matplotlib. It is a single file that needs no network.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ..planning.compiling.cache import write_whole
from ..planning.reporting.page import document, tables, target, target_of_plot
from ..planning.reporting.tables import (
    UNKNOWN,
    Section,
    aligned,
    figure,
    milliseconds,
    percent,
)
from ..tpu.calibration import Calibration
from .findings import Finding, Status
from .records import CollectiveTime, Machine, Rate, StepRun

_FORMAT, _VERSION = "xla_fsdp verification", 1
_CPU_NOTE = (
    "The ranks are threads of one CPU: tests are valid, but times do not predict those of a TPU."
)
_STYLE = """
.ok { color: #00694f } .different { color: #8a6100 } .failed { color: #b03a00; font-weight: 600 }
.skipped { color: #777 }
"""
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_BARS = {"xla_fsdp": "#0072B2", "in-tree": "#8A8A8A", "planned": "#E69F00"}


@dataclass(frozen=True, repr=False)
class Verification:
    """The report: ``print`` it, ``save`` it, ``plot`` it; ``calibration`` is for plans.

    ``planned_for``: the slice for which the steps were planned, "" if they were not.
    """

    where: Machine
    findings: tuple[Finding, ...]
    rates: tuple[Rate, ...]
    collectives: tuple[CollectiveTime, ...]
    steps: tuple[StepRun, ...]
    calibration: Calibration
    planned_for: str = ""

    @property
    def ok(self) -> bool:
        """Whether no test failed; measurements may differ from published figures."""
        return not any(found.status is Status.FAILED for found in self.findings)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        counts = Counter(found.status for found in self.findings)
        shown = ", ".join(f"{counts[each]} {each.value}" for each in Status if counts[each])
        what = "PASSED" if self.ok else "FAILED"
        on = f"{self.where.ranks} ranks on {self.where.device or 'unknown devices'}"
        return f"{what}: {shown or 'nothing was checked'} ({on})"

    def __repr__(self) -> str:
        return f"<Verification {self.verdict}>"

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [_CPU_NOTE] if self.where.family == "cpu" else []
        for found in self.findings:
            lines += textwrap.wrap(found.line(9, 26), 110, subsequent_indent=" " * 37)
        for section in _sections(self):
            table = [(section.title, *section.columns)]
            table += [(f"  {row[0]}", *row[1:]) for row in section.rows]
            lines += ["", *aligned(table, [False, *section.numeric()[1:]])]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON, for programs."""
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "ok": self.ok,
            "where": asdict(self.where),
            "findings": [_finding(f) for f in self.findings],
            "rates": [asdict(rate) | {"value": rate.value} for rate in self.rates],
            "collectives": [asdict(time) for time in self.collectives],
            "steps": [asdict(run) for run in self.steps],
            "planned_for": self.planned_for,
            "calibration": {
                name: getattr(self.calibration, name)
                for name in self.calibration.__dataclass_fields__
                if name != "about"
            },
        }
        return json.dumps(data, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as JSON. The file is complete or does not exist.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        write_whole(target(path), self.to_json().encode())

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained HTML page with findings, curves and tables.

        Raises:
            ValueError: the path does not end in .html.
            FileNotFoundError: the folder does not exist.
            MissingExtraError: (an ImportError) matplotlib is not installed.
        """
        write_whole(target_of_plot(path), _page(self).encode())

    def failures(self) -> list[str]:
        """The names of the tests that failed."""
        return [found.name for found in self.findings if found.status is Status.FAILED]


def _finding(found: Finding) -> dict[str, str]:
    data = {**asdict(found), "status": found.status.value}
    return {"promised" if key == "expected" else key: text for key, text in data.items()}


def _sections(found: Verification) -> list[Section]:
    """The tables that are not empty."""
    where = found.where
    rates = [
        (
            rate.name,
            figure(rate.value / 1e12, 2, "TFLOP/s")
            if rate.unit == "FLOP"
            else figure(rate.value / 1e9, 2, "GB/s"),
            UNKNOWN if rate.published is None else percent(rate.value / rate.published),
        )
        for rate in found.rates
    ]
    collectives = [
        (
            f"{time.kind}, {time.axis}",
            figure(time.bytes / 1024, 0, "KiB"),
            milliseconds(time.seconds, 4),
            milliseconds(time.modelled, 4),
            figure(time.sent / time.seconds / 1e9, 2, "GB/s"),
        )
        for time in found.collectives
    ]
    steps = [
        (
            f"{run.name}, {run.lane}",
            *map(milliseconds, (run.seconds, run.host, run.planned)),
            *(figure(n and n / 2**20, 0, "MiB") for n in (run.hbm, run.planned_hbm)),
        )
        for run in found.steps
    ]
    about = [("device", f"{where.device or UNKNOWN} ({where.family})"), ("ranks", str(where.ranks))]
    about += [("slice", where.topology or UNKNOWN), ("date", where.date)]
    if found.planned_for and found.planned_for != where.topology:
        about.append(("planned for", found.planned_for))
    about += [*where.versions.items(), *where.environment.items()]
    tables: list[tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]] = [
        ("One device", ("attained", "of the published figure"), rates),
        ("Collectives", ("size", "measured", "modelled", "sent by a rank"), collectives),
        ("Steps", ("step time", "traced in", "planned", "peak HBM", "planned HBM"), steps),
        ("Where", ("",), about),
    ]
    return [Section(title, columns, tuple(rows)) for title, columns, rows in tables if rows]


def _draw_collectives(found: Verification) -> str:
    """Plots a rank's bytes sent for each second by size; the dashed lines are the model.

    Each kind of collective has a panel, and each axis a line.
    """
    from ..planning.reporting.pictures import canvas, clean, embed  # imports matplotlib

    kinds = list(dict.fromkeys(time.kind for time in found.collectives))
    colors = dict(zip(dict.fromkeys(t.axis for t in found.collectives), _COLORS, strict=False))
    figure = canvas(12.5, 3.4)
    for number, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), number + 1)
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
    return embed(figure)


def _line(axes: Any, some: list[CollectiveTime], color: str, label: str) -> None:
    sizes = [time.bytes for time in some]
    speeds = [time.sent / time.seconds / 1e9 for time in some]
    axes.loglog(sizes, speeds, color=color, marker="o", markersize=4, label=label)
    modelled = [time.sent / time.modelled / 1e9 for time in some if time.modelled]
    if len(modelled) == len(sizes):
        axes.loglog(sizes, modelled, color=color, linestyle="--", linewidth=1)


def _draw_steps(found: Verification) -> str:
    """Plots the milliseconds of each step: xla_fsdp, in-tree, planned."""
    from ..planning.reporting.pictures import canvas, clean, embed

    names = list(dict.fromkeys(run.name for run in found.steps))
    figure = canvas(12.5, 0.6 + 0.9 * len(names))
    axes = figure.add_subplot()
    clean(axes)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    for row, name in enumerate(names):
        runs = [run for run in found.steps if run.name == name]
        times: dict[str, float | None] = {run.lane: run.seconds for run in runs}
        if found.where.family != "cpu":
            times["planned"] = next((run.planned for run in runs if run.planned), None)
        for place, (label, color) in enumerate(_BARS.items()):
            if seconds := times.get(label):
                y = row + 0.27 * (place - 1)
                axes.barh(y, 1e3 * seconds, 0.24, color=color, label=label if row == 0 else None)
                axes.text(1e3 * seconds, y, f" {1e3 * seconds:.2f}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds for each step")
    axes.margins(x=0.1)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    return embed(figure)


def _page(found: Verification) -> str:
    """The HTML of the page, with every text escaped."""
    heading = f'<h1 class="{"fits" if found.ok else "not"}">{escape(found.verdict)}</h1>'
    parts = [heading]
    parts += [f"<p>{escape(_CPU_NOTE)}</p>"] * (found.where.family == "cpu")
    parts.append("<h2>Findings</h2>")
    rows = "".join(
        f'<tr><td class="{f.status.name.lower()}">{escape(f.status.value)}</td>'
        + "".join(f"<td>{escape(text)}</td>" for text in (f.name, f.found, f.expected, f.remedy))
        + "</tr>"
        for f in found.findings
    )
    head = "<tr><th></th><th></th><th>found</th><th>expected</th><th>remedy</th></tr>"
    parts.append(f'<div class="scroll"><table>{head}{rows}</table></div>')
    if found.collectives:
        note = "Lines: measured; dashed: modelled from published figures."
        parts += ["<h2>Collectives by size</h2>", f"<p>{note}</p>", _draw_collectives(found)]
    if found.steps:
        parts += ["<h2>Steps</h2>", _draw_steps(found)]
    parts.append(tables(_sections(found)))
    return document("xla_fsdp verification", parts, _STYLE)
