"""``Report``: the figures of one compiled step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from ... import extras
from ...deprecated import accept_old_names
from ...files import parse_record
from ..compiling.plan_cache import write_whole
from ..records import CompilerMemory, HostNeeds, ProgramPart, Schedule, Timing, reader
from . import page, tables
from .page import require_parent, target_of_plot
from .tables import GIB, MB, MB_MEANS, MIB, TINY, aligned, executions, figure, fraction, wire

if TYPE_CHECKING:
    from .trace_comparison import TraceComparison

_FORMAT, _VERSION = "xla_fsdp plan", 1
_EXPECTED = f"expected a report of Report.save(), JSON with format {_FORMAT!r}; plan again"


@accept_old_names
@dataclass(frozen=True, repr=False)
class Report:
    """What a compiled step needs on a slice: ``print`` it, plot, save and compare it.

    All bytes are of one device and one step. Raises ValueError without devices or memory.
    """

    topology: str
    chip: str
    devices: int
    hbm_capacity: int  # usable bytes a device
    hbm_source: str
    memory: CompilerMemory
    schedule: Schedule
    timing: Timing
    bound_wire_bytes: int | None  # of ZeRO; None if unknown
    bound_label: str
    link_model: str  # assumptions and sources
    compile_seconds: float
    program_bytes: int
    ranks_traced: tuple[int, ...]
    executables: int  # distinct programs
    from_cache: bool = False
    title: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    # The value of each option that was set, and who set it, in brackets.
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    chip_config: str = ""  # how cores form devices; "" if there is only one way
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    refusal: str = ""  # the compiler's message if it does not fit
    host: HostNeeds | None = None  # if the optimizer steps on the host
    parts: tuple[ProgramPart, ...] = ()  # if the step consists of several programs
    # Peaks of planning and compiling; 0 in results of older versions.
    planner_host_memory: int = 0
    compiler_host_memory: int = 0

    def __post_init__(self) -> None:
        for name in ("devices", "hbm_capacity"):
            if getattr(self, name) < 1:
                message = f"{name} is {getattr(self, name)!r}: a report needs at least 1"
                raise ValueError(message)

    @property
    def fits(self) -> bool:
        """Whether the step can be loaded and run."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        return not self.refusal and self.memory.required <= self.hbm_capacity

    @property
    def host_required(self) -> int:
        """Bytes of host memory: offloaded state, and offloaded inputs of layers."""
        if self.host is None:
            return 0
        return self.host.required + self.host.ranks * self.memory.host_temporaries

    @property
    def fits_host(self) -> bool:
        """True if nothing is offloaded."""
        return self.host is None or self.host_required <= self.host.capacity

    @property
    def headroom(self) -> float:
        """The share of HBM that stays free; negative if the step does not fit."""
        return 1 - self.memory.required / self.hbm_capacity

    @property
    def sized(self) -> bool:
        """Whether the required memory is known; it is not if the compiler stopped early."""
        return self.memory.required > 0 or not self.refusal

    @property
    def placed(self) -> bool:
        """Whether the compiler made a schedule."""
        return self.schedule.length > 0

    @property
    def timed(self) -> bool:
        """Whether the compiler estimated cycles, as it does for steps that fit."""
        # If the step does not fit, only Pallas kernels have times, and those are modelled.
        return not self.refusal and self.timing.compute > 0

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step; loops count per iteration."""
        if self.parts:
            return sum(part.wire_bytes * part.times for part in self.parts)
        return sum(c.wire_bytes * c.times for c in self.schedule.collectives)

    @property
    def wire_ratio(self) -> float | None:
        """``wire_bytes`` over the bound; None if one of them is unknown."""
        if not self.bound_wire_bytes or not self.placed:
            return None
        return self.wire_bytes / self.bound_wire_bytes

    @property
    def verdict(self) -> str:
        of = f"of {self.hbm_capacity / GIB:.1f} GiB a device on {self.topology}"
        required = f"{self.memory.required / GIB:.1f}"
        if self.memory.required < GIB / 10:
            required = f"{self.memory.required / MIB:.1f} MiB"
        if self.host is not None and self.fits_device and not self.fits_host:
            return (
                f"DOES NOT FIT: {self.host_required / 1e9:.0f} GB of {self.host.capacity / 1e9:.0f}"
                f" GB that a host of {self.topology} has"
            )
        if self.fits:
            return f"FITS: {required} {of} ({100 * self.headroom:.0f} % headroom)"
        missing = (self.memory.required - self.hbm_capacity) / GIB
        if missing <= 0:
            return f"DOES NOT FIT: {self.topology} has {self.hbm_capacity / GIB:.1f} GiB a device"
        return f"DOES NOT FIT: {required} {of} ({missing:.2f} GiB too much)"

    def __repr__(self) -> str:
        return f"<Report {self.title or 'step'}: {self.verdict}>"

    def __str__(self) -> str:
        return tables.report_text(self)

    @property
    def time_by_kind(self) -> dict[str, float]:
        """The modelled seconds of a step by what takes them: matmuls, attention and other Pallas
        kernels, elementwise operations, copies, recomputation, the optimizer, and waiting for
        collectives and copies to the host.

        Empty if the compiler estimated no times, and for a step of several programs.
        """
        return tables.time_by_kind(self)

    def to_json(self) -> str:
        """The complete report as JSON; ``from_json`` reads it."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "report": self}
        # For readers of the file; not read back.
        for name in ("time_by_kind", "time_by_module", "hbm_by_kind"):
            data[name] = getattr(tables, name)(self)
        return json.dumps(data, default=_to_json)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "this text") -> Report:
        """Read the report that ``to_json`` wrote; sequences become tuples.

        Raises ValueError, which names ``source``, if the text is not such a report.
        """
        # Older reports have another name for this field.
        text = text.encode() if isinstance(text, str) else text
        text = text.replace(b'"beside"', b'"other_programs"')
        data = parse_record(text, source, _FORMAT, _VERSION, _EXPECTED)
        try:
            report: Report = reader(cls)(data.get("report"))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            message = f"{source} is damaged ({found}): {_EXPECTED}"
            raise ValueError(message) from error
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, atomically.

        Raises FileNotFoundError if there is no such folder.
        """
        write_whole(require_parent(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what ``save`` wrote.

        Raises FileNotFoundError, or ValueError if the file is not a report.
        """
        return cls.from_json(Path(path).read_bytes(), str(path))

    def compare(self, other: Report) -> PlanComparison:
        """Compare this report with another one; ratios are this one over the other.

        Raises TypeError if ``other`` is not a report.
        """
        if not isinstance(other, Report):
            message = f"cannot compare {type(other).__name__}: give a Report (of plan or load)"
            raise TypeError(message)
        figures = tuple(
            ComparedFigure(name, unit, value, another)
            for (name, unit, value), (_, _, another) in zip(
                _figures(self), _figures(other), strict=True
            )
        )
        names = (self.title or self.topology, other.title or other.topology)
        if names[0] == names[1]:
            marks = (self.topology, other.topology)
            marks = ("this", "other") if marks[0] == marks[1] else marks
            names = (f"{names[0]} ({marks[0]})", f"{names[1]} ({marks[1]})")
        remark = ""
        if (self.topology, self.devices) != (other.topology, other.devices):
            sizes = [f"{r.topology} ({r.devices} devices)" for r in (self, other)]
            remark = f"Not the same slice: {sizes[0]} and {sizes[1]}."
        return PlanComparison(names, (self.verdict, other.verdict), figures, remark)

    def compare_trace(self, trace: str | os.PathLike[str]) -> TraceComparison:
        """Compare this plan with a recorded trace: ``print`` the result, or ``.plot("both.html")``.

        ``trace``: the folder that was given to :class:`xla_fsdp.profile` (its newest trace is
        read), or a file in it.

        Raises:
            FileNotFoundError: there is no trace.
            ValueError: the trace is damaged, has no module names, or is of another model; or this
                plan has no timeline.
            MissingExtraError: (an ImportError) protobuf is not installed.
        """
        extras.require_extra("plan", "a recorded trace", ("google.protobuf",))
        if tables.why_no_pictures(self):
            raise ValueError(f"nothing to compare a trace with. {tables.why_no_pictures(self)}")
        from ..recorded import read_trace  # imports protobuf
        from .trace_comparison import TraceComparison

        return TraceComparison(self, read_trace(trace))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot HBM over the schedule and the timeline of the step.

        ``.png`` is a picture, ``.html`` one self-contained page with picture and tables,
        ``.trace.json`` every operation and the memory in use, for https://ui.perfetto.dev.

        Raises ValueError for another suffix, FileNotFoundError if there is no such folder, and
        MissingExtraError (an ImportError) if matplotlib is not installed.
        """
        place = target_of_plot(path, (".png", ".html", ".trace.json"))
        from . import pictures  # imports matplotlib

        kind = place.suffix.lower()
        if kind == ".png":
            content = pictures.png(pictures.draw(self))
        elif kind == ".html":
            content = page.page(self).encode()
        else:
            content = pictures.trace({"modelled": self.timing.slots}, self).encode()
        write_whole(place, content)


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of two reports; None if a report does not have it."""

    name: str
    unit: str
    left: float | None
    right: float | None

    @property
    def ratio(self) -> float | None:
        if self.left is None or not self.right or self.left / self.right < 0:
            return None
        return self.left / self.right


@dataclass(frozen=True)
class PlanComparison:
    """Two reports, figure by figure. Ratios are left over right."""

    names: tuple[str, str]
    verdicts: tuple[str, str]
    figures: tuple[ComparedFigure, ...]
    remark: str = ""  # why the two are not directly comparable

    def __getitem__(self, name: str) -> ComparedFigure:
        """Raises KeyError, which lists all names."""
        for one in self.figures:
            if one.name == name:
                return one
        raise KeyError(f"{name!r}: allowed are {', '.join(f.name for f in self.figures)}")

    def __str__(self) -> str:
        most = max(map(len, self.names))
        lines = [f"{n:{most}}  {v}" for n, v in zip(self.names, self.verdicts, strict=True)]
        lines += [self.remark, ""] if self.remark else [""]
        rows = [("", *self.names, "ratio")]
        for f in self.figures:
            unit = f"{f.unit} ({MB_MEANS})" if f.unit == "MB" else f.unit
            name = f"{f.name}, {unit}" if unit else f.name
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
            digits = {"": 0, "GiB": 3, "×": 2}.get(f.unit, 1)
            rows.append((name, figure(f.left, digits), figure(f.right, digits), ratio))
        return "\n".join([*lines, *aligned(rows, [False, True, True, True])])


def _figures(report: Report) -> list[tuple[str, str, float | None]]:
    memory, timing, collectives = report.memory, report.timing, report.schedule.collectives
    sized, placed, timed = report.sized, report.placed, report.timed
    ready = [c for c in collectives if c.asynchronous]
    tiny = [c for c in collectives if c.bytes < TINY]
    overlapped = fraction(timing.overlapped, timing.collective)
    built = bool(report.program_bytes) or not report.refusal
    figures: list[tuple[str, str, bool, float | None]] = [
        ("required HBM", "GiB", sized, memory.required / GIB),
        ("arguments", "GiB", sized, memory.arguments / GIB),
        ("temporaries", "GiB", sized, memory.temporaries / GIB),
        ("live peak", "GiB", sized, memory.peak / GIB),
        ("headroom", "%", sized, 100 * report.headroom),
        ("capacity", "GiB", True, report.hbm_capacity / GIB),
        ("sent", "MB", placed, report.wire_bytes / MB),
        ("collectives", "", placed, executions(collectives)),
        ("synchronous", "", placed, executions(collectives) - executions(ready)),
        ("smaller than 64 KiB", "", placed, executions(tiny)),
        ("asynchronous share", "%", placed, 100 * fraction(wire(ready), report.wire_bytes)),
        ("collective time (model)", "ms", placed, 1e3 * timing.collective),
        ("sent / bound", "×", True, report.wire_ratio),
        ("compute (model)", "ms", timed, 1e3 * timing.compute),
        ("overlapped share (model)", "%", timed, 100 * overlapped),
        ("exposed (model)", "ms", timed, 1e3 * timing.exposed),
        ("step (model)", "ms", timed, 1e3 * timing.step),
        ("MFU (model)", "%", timed, 100 * timing.mfu),
        ("compile time", "s", True, report.compile_seconds),
        ("code", "MiB", built, report.program_bytes / MIB),
        ("executables", "", True, report.executables),
    ]
    return [(name, unit, value if known else None) for name, unit, known, value in figures]


def _to_json(value: Any) -> Any:
    if is_dataclass(value):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"{value!r:.60} in a report: allowed are data classes and types of JSON")
