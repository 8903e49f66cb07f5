"""The report of a verification: as text, as JSON, and as one HTML page."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape

from ..planning.compiling.plan_cache import write_whole
from ..planning.reporting.page import document, require_parent, tables
from ..planning.reporting.tables import UNKNOWN, Section, aligned, figure, milliseconds, percent
from ..tpu.calibration import Calibration
from .findings import Finding, Status, count_by_status
from .measurements import CollectiveTime, Machine, Rate, StepRun

_FORMAT, _VERSION = "xla_fsdp verification", 1
_CPU_NOTE = (
    "The ranks are threads of one CPU: tests are valid, but times do not predict those of a TPU."
)


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
        return not self.failures()

    @property
    def verdict(self) -> str:
        """The result in one line."""
        what = "PASSED" if self.ok else "FAILED"
        on = f"{self.where.ranks} ranks on {self.where.device or 'unknown devices'}"
        return f"{what}: {count_by_status(self.findings) or 'nothing was checked'} ({on})"

    def __repr__(self) -> str:
        return f"<Verification {self.verdict}>"

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [_CPU_NOTE] if self.where.family == "cpu" else []
        for found in self.findings:
            lines += textwrap.wrap(found.line(), 110, subsequent_indent=" " * 30)
        for section in _verification_sections(self):
            table = [(section.title, *section.columns)]
            table += [(f"  {row[0]}", *row[1:]) for row in section.rows]
            lines += ["", *aligned(table, [False, *section.numeric()[1:]])]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON."""
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
        write_whole(require_parent(path), self.to_json().encode())

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained HTML page with findings and tables.

        Raises:
            ValueError: the path does not end in .html.
            FileNotFoundError: the folder does not exist.
        """
        if not os.fspath(path).endswith(".html"):
            raise ValueError(f"cannot plot to {str(path)!r}: allowed is .html; rename the file")
        write_whole(require_parent(path), _verification_page(self).encode())

    def failures(self) -> list[str]:
        """The names of the tests that failed."""
        return [found.name for found in self.findings if found.status is Status.FAILED]


def _finding(found: Finding) -> dict[str, str]:
    data = {**asdict(found), "status": found.status.value}
    return {"promised" if key == "expected" else key: text for key, text in data.items()}


def _verification_sections(found: Verification) -> list[Section]:
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


def _verification_page(found: Verification) -> str:
    parts = [f'<h1 class="{"fits" if found.ok else "not"}">{escape(found.verdict)}</h1>']
    parts += [f"<p>{escape(_CPU_NOTE)}</p>"] * (found.where.family == "cpu")
    rows = tuple((f.status.value, f.name, f.found, f.expected, f.remedy) for f in found.findings)
    findings = Section("Findings", ("", "found", "expected", "remedy"), rows)
    parts.append(tables([findings] * bool(rows) + _verification_sections(found)))
    return document("xla_fsdp verification", parts)
