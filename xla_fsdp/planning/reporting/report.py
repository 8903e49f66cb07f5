"""``Report``: print, plot, save, load and compare the report on one compiled step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import extras
from ...deprecated import accept_old_names
from ..compiling.cache import write_whole
from . import page, storage, text
from .amounts import GIB, MB, MB_MEANS, MIB, figure, share
from .findings import Findings
from .tables import TINY, aligned, count, wire

if TYPE_CHECKING:
    from .beside import Beside


@dataclass(frozen=True)
class Figure:
    """One figure of two reports; None if a report does not have it."""

    name: str
    unit: str
    left: float | None
    right: float | None

    @property
    def ratio(self) -> float | None:
        """Left over right; None if it is not defined."""
        if self.left is None or not self.right or self.left / self.right < 0:
            return None
        return self.left / self.right


@dataclass(frozen=True)
class Comparison:
    """Two reports, figure by figure. Ratios are left over right."""

    names: tuple[str, str]
    verdicts: tuple[str, str]
    figures: tuple[Figure, ...]
    remark: str = ""  # why the two are not directly comparable

    def __getitem__(self, name: str) -> Figure:
        """The figure with this name.

        Raises:
            KeyError: there is no such figure; the message lists all names.
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
        """The table in Markdown, including the verdicts."""
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


def _compare(left: Findings, right: Findings) -> Comparison:
    """Compare the main figures of two reports.

    Raises:
        TypeError: one of them is not a report.
    """
    for report in (left, right):
        if not isinstance(report, Findings):
            message = f"cannot compare {type(report).__name__}: give a Report (of plan or load)"
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
    """The figures; with None for each value if they are not ``known``."""
    return [(name, unit, value if known else None) for name, unit, value in figures]


def _number(value: float | None, unit: str) -> str:
    return figure(value, {"": 0, "GiB": 3, "×": 2}.get(unit, 1))


@accept_old_names
class Report(Findings):
    """What a compiled step needs on a slice: ``print`` it, plot, save and compare it."""

    def __repr__(self) -> str:
        return f"<Report {self.title or 'step'}: {self.verdict}>"

    def __str__(self) -> str:
        return text.text(self)

    def to_json(self) -> str:
        """The complete report as JSON; ``from_json`` reads it."""
        return storage.encode(self)

    @classmethod
    def from_json(cls, text: str, source: str = "this text") -> Report:
        """Read the report that ``to_json`` wrote; sequences become tuples.

        Raises:
            ValueError: the text is not such a report. The message names ``source``, where the text
                comes from.
        """
        return storage.decode(cls, text, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report, including the schedule, as JSON. The file is written completely or not
        at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        write_whole(storage.target(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a report.
        """
        return cls.from_json(storage.read(path), str(path))

    def compare(self, other: Report) -> Comparison:
        """Compare this report with another one; ratios are this one over the other.

        Raises:
            TypeError: ``other`` is not a report.
        """
        return _compare(self, other)

    def compare_trace(self, trace: str | os.PathLike[str]) -> Beside:
        """Compare this plan with a recorded trace: ``print`` the result, or ``.plot("both.html")``.

        ``trace``: the folder that was given to :class:`xla_fsdp.profile` (its newest trace is
        read), or a file in it.

        Raises:
            FileNotFoundError: there is no trace.
            ValueError: the trace is damaged, has no module names, or is of another model; or this
                plan has no timeline.
            MissingExtraError: (an ImportError) protobuf or jax is not installed.
        """
        extras.require_extra("plan", "a recorded trace", ("google.protobuf", "jaxlib"))
        if text.missing(self):
            raise ValueError(f"nothing to compare a trace with. {text.missing(self)}")
        from ..recorded.trace import read_trace  # imports protobuf, which plans do not need
        from .beside import Beside

        return Beside(self, read_trace(trace))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot HBM over the schedule and the timeline of the step, with matplotlib.

        ``.png`` is a picture. ``.html`` is one self-contained page with the tables as well; its
        pictures show figures when the pointer is over them.

        Raises:
            ValueError: ``path`` has another suffix.
            FileNotFoundError: there is no such folder.
            MissingExtraError: (an ImportError) matplotlib is not installed.
        """
        target = storage.target(path)
        if target.suffix.lower() not in (".png", ".html"):
            message = f"cannot plot to {str(path)!r}: allowed are .png and .html; rename the file"
            raise ValueError(message)
        extras.require_extra("plan", "a plot", ("matplotlib",))
        if target.suffix.lower() == ".html":
            write_whole(target, page.page(self).encode())
        else:
            from .pictures import (
                picture,
            )  # imports matplotlib, which printing and saving do not need

            write_whole(target, picture(self))
