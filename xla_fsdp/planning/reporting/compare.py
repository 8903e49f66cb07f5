"""Two reports side by side."""

from __future__ import annotations

from dataclasses import dataclass

from .amounts import GIB, MB, MB_MEANS, MIB, figure, share
from .findings import Findings
from .tables import TINY, aligned, count, wire


@dataclass(frozen=True)
class Figure:
    """A figure of both reports; None where a report has none."""

    name: str
    unit: str
    left: float | None
    right: float | None

    @property
    def ratio(self) -> float | None:
        """Left over right; None where that means nothing."""
        if self.left is None or not self.right or self.left / self.right < 0:
            return None
        return self.left / self.right


@dataclass(frozen=True)
class Comparison:
    """Two reports, figure by figure. Ratios are the left one over the right one."""

    names: tuple[str, str]
    verdicts: tuple[str, str]
    figures: tuple[Figure, ...]
    remark: str = ""  # why the two are not quite comparable

    def __getitem__(self, name: str) -> Figure:
        """The figure of that name.

        Raises:
            KeyError: there is none; the message lists all names.
        """
        for one in self.figures:
            if one.name == name:
                return one
        raise KeyError(f"{name!r}: allowed are {', '.join(f.name for f in self.figures)}")

    def __str__(self) -> str:
        most = max(map(len, self.names))
        lines = [f"{n:{most}}  {v}" for n, v in zip(self.names, self.verdicts, strict=True)]
        lines += [self.remark, ""] if self.remark else [""]
        return "\n".join([*lines, *aligned(self._table(), [False, True, True, True])])

    def markdown(self) -> str:
        """The table in Markdown, verdicts included."""
        rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in r] for r in self._table()]
        verdicts = ["verdict", *(v.replace("|", "\\|").split(":")[0] for v in self.verdicts), ""]
        lines = [rows[0], ["---", "---:", "---:", "---:"], verdicts, *rows[1:]]
        text = "\n".join(f"| {' | '.join(row)} |" for row in lines)
        return f"{text}\n\n{self.remark}" if self.remark else text

    def _table(self) -> list[tuple[str, str, str, str]]:
        rows = [("", *self.names, "ratio")]
        for f in self.figures:
            unit = f"{f.unit} ({MB_MEANS})" if f.unit == "MB" else f.unit
            name = f"{f.name}, {unit}" if unit else f.name
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
            rows.append((name, _number(f.left, f.unit), _number(f.right, f.unit), ratio))
        return rows


def compare(left: Findings, right: Findings) -> Comparison:
    """All main figures of two reports.

    Raises:
        TypeError: one of them is no report.
    """
    for report in (left, right):
        if not isinstance(report, Findings):
            message = f"cannot compare {type(report).__name__}: allowed is Report; plan or load it"
            raise TypeError(message)
    one, two = _figures(left), _figures(right)
    figures = tuple(
        Figure(name, unit, value, other)
        for (name, unit, value), (_, _, other) in zip(one, two, strict=True)
    )
    names = (left.title or left.topology, right.title or right.topology)
    if names[0] == names[1]:
        marks = (f"{left.topology}", f"{right.topology}")
        marks = ("this", "other") if marks[0] == marks[1] else marks
        names = (f"{names[0]} ({marks[0]})", f"{names[1]} ({marks[1]})")
    remark = ""
    if (left.topology, left.devices) != (right.topology, right.devices):
        sizes = [f"{r.topology} ({r.devices} devices)" for r in (left, right)]
        remark = f"Not the same slice: {sizes[0]} and {sizes[1]}."
    return Comparison(names, (left.verdict, right.verdict), figures, remark)


def _figures(report: Findings) -> list[tuple[str, str, float | None]]:
    memory, timing, collectives = report.memory, report.timing, report.schedule.collectives
    ready = [c for c in collectives if c.asynchronous]
    tiny = [c for c in collectives if c.bytes < TINY]
    held: list[tuple[str, str, float]] = [
        ("required HBM", "GiB", memory.required / GIB),
        ("arguments", "GiB", memory.arguments / GIB),
        ("temporaries", "GiB", memory.temporaries / GIB),
        ("live peak", "GiB", memory.peak / GIB),
        ("headroom", "%", 100 * report.headroom),
    ]
    sent = [
        ("sent", "MB", report.wire_bytes / MB),
        ("collectives", "", count(collectives)),
        ("synchronous", "", count(collectives) - count(ready)),
        ("smaller than 64 KiB", "", count(tiny)),
        ("asynchronous share", "%", 100 * share(wire(ready), report.wire_bytes)),
        ("collective time (model)", "ms", 1e3 * timing.collective),
    ]
    took = [
        ("compute (model)", "ms", 1e3 * timing.compute),
        ("hidden share (model)", "%", 100 * share(timing.overlapped, timing.collective)),
        ("exposed (model)", "ms", 1e3 * timing.exposed),
        ("step (model)", "ms", 1e3 * timing.step),
        ("MFU (model)", "%", 100 * timing.mfu),
    ]
    built = [("code", "MiB", report.program_bytes / MIB)]
    return [
        *_where(report.sized, held),
        ("capacity", "GiB", report.hbm_capacity / GIB),
        *_where(report.placed, sent),
        ("sent / bound", "×", report.wire_ratio),
        *_where(report.timed, took),
        ("compile time", "s", report.compile_seconds),
        *_where(report.program_bytes or not report.refusal, built),
        ("executables", "", report.executables),
    ]


def _where(
    known: object, figures: list[tuple[str, str, float]]
) -> list[tuple[str, str, float | None]]:
    """The figures, without values where they are not known."""
    return [(name, unit, value if known else None) for name, unit, value in figures]


def _number(value: float | None, unit: str) -> str:
    return figure(value, {"": 0, "GiB": 3, "×": 2}.get(unit, 1))
