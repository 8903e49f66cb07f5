"""Compares a plan with a recorded trace of the same step."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from ...wording import join_some
from ..compiling.plan_cache import write_whole
from ..recorded import RecordedStep, Share
from ..records import KINDS, PHASES
from .page import document, tables, target_of_plot
from .tables import (
    NO_MODULE,
    NO_PHASE,
    Section,
    figure,
    fraction,
    milliseconds,
    percent,
    short,
    unit_names,
)

if TYPE_CHECKING:
    from .report import Report

_CPU_NOTE = (
    "Recorded on CPU ranks: compare only which operations there are, their order and their shares. "
    "Milliseconds and ratios are not those of a TPU. On CPU ranks each parameter has a separate "
    "collective; on a TPU the small parameters of a unit share one: compare collectives by unit."
)
_COLUMNS = ("modelled", "share", "measured", "share", "ratio")
_MOST = 24  # collectives in the table
Total = tuple[float | None, float | None]  # seconds modelled and measured


@dataclass(frozen=True)
class TraceComparison:
    """A plan compared with a recorded step: ``print`` it, or ``plot`` it as a page.

    Raises ValueError if they have no names of modules and parameters in common.
    """

    report: Report
    recorded: RecordedStep

    @cached_property
    def planned(self) -> list[Share]:
        once: dict[tuple[int, str], float] = {}
        for slot in self.report.timing.slots:
            once.setdefault((slot.index, slot.label), slot.end - slot.begin)
        shares = []
        for op in self.report.schedule.ops:
            seconds = once.get((op.index, op.name), 0.0) * op.times
            if seconds:
                shares.append(Share("compute", op.phase, op.module, seconds))
        for c in self.report.schedule.collectives:
            seconds = once.get((c.index, c.name), 0.0) * c.times
            waited = 0.0 if c.asynchronous else seconds
            shares.append(Share(c.asked or c.kind, c.phase, c.module, seconds, waited))
        return shares

    def __post_init__(self) -> None:
        ours, theirs = {s.module for s in self.planned} - {""}, self.recorded.modules
        if not ours & theirs:
            raise ValueError(
                f"{self.recorded.source}: is of another model than the plan: its modules are "
                f"{_some(theirs)}; those of the plan are {_some(ours) or 'unknown'}"
            )

    @property
    def verdict(self) -> str:
        step, found = self.report.timing.step, self.recorded.seconds
        return (
            f"A step on {self.recorded.device} took {milliseconds(found)}; modelled for "
            f"{self.report.topology}: {milliseconds(step)} ({_quotient(step, found)} ×)"
        )

    def notes(self) -> list[str]:
        recorded = self.recorded
        notes = [_CPU_NOTE] if recorded.on_cpu else []
        where = f"{recorded.source}: {recorded.steps} step{'s' * (recorded.steps > 1)}"
        notes += [f"{where}; the timeline is of the median one, times in tables are means."]
        if recorded.on_cpu and recorded.ranks > 1:
            notes += [f"The timeline shows all {recorded.ranks} ranks of the process together."]
        ours, theirs = {s.module for s in self.planned} - {""}, set(recorded.modules)
        for whose, names in (("plan", ours - theirs), ("trace", theirs - ours)):
            if names:
                notes += [f"Only in the {whose}: {_some(names)}."]
        notes += [
            "The measured time of a collective is from its start to the end of the instruction "
            "that waits for it. The modelled time assumes that nothing else uses its links."
        ]
        return notes

    def sections(self) -> list[Section]:
        tables = [self._step(), self._by_kind(), self._by_unit(), self._collectives()]
        return [table for table in tables if table.rows]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write both timelines: ``.html`` is one self-contained page with the tables as well;
        ``.trace.json`` has every operation, for https://ui.perfetto.dev.

        Raises as :meth:`Report.plot`.
        """
        place = target_of_plot(path, (".html", ".trace.json"))
        write_whole(place, (self._page() if place.suffix == ".html" else self._trace()).encode())

    def __str__(self) -> str:
        lines = [self.verdict]
        for section in self.sections():
            lines += ["", *section.lines()]
        return "\n".join([*lines, "", *(f"* {note}" for note in self.notes())])

    def _step(self) -> Section:
        timing, recorded = self.report.timing, self.recorded
        compute = sum(s.seconds for s in recorded.shares if s.kind == "compute")
        others = [s for s in recorded.shares if s.kind != "compute"]
        rows: list[tuple[str, float | None, float | None]] = [
            ("first to last instruction", timing.step, recorded.seconds),
            ("from one step to the next", None, recorded.period),
            ("compute", timing.compute, compute),
            ("collectives", timing.collective, sum(s.seconds for s in others)),
            ("collectives that compute waits for", timing.exposed, sum(s.waited for s in others)),
        ]
        cells = [(name, _ms(a), _ms(b), _quotient(a, b)) for name, a, b in rows]
        return Section("A step", ("modelled", "measured", "ratio"), tuple(cells))

    def _by_kind(self) -> Section:
        def name(one: Share) -> str:
            phase = one.phase or "other"
            return f"{phase} compute" if one.kind == "compute" else f"{one.kind}, {phase}"

        order = [f"{p or 'other'} compute" for p in PHASES]
        order += [f"{kind}, {p or 'other'}" for kind in KINDS for p in PHASES]
        found = sorted(self._totals(name), key=lambda one: order.index(one[0]))
        return self._compared("By kind", found)

    def _by_unit(self) -> Section:
        unit = unit_names(s.module for s in (*self.planned, *self.recorded.shares))

        def name(one: Share) -> str:
            what = "compute" if one.kind == "compute" else "collectives"
            return f"{unit[one.module] or NO_MODULE}: {what}"

        found = self._totals(name)
        order = list(dict.fromkeys(row.rpartition(": ")[0] for row, _ in found))
        found.sort(key=lambda one: order.index(one[0].rpartition(": ")[0]))
        return self._compared("By unit", found)

    def _collectives(self) -> Section:
        found = self._totals(
            lambda s: f"{s.kind}, {s.phase or NO_PHASE}: {s.module or NO_MODULE}",
            lambda s: s.kind != "compute",
        )
        found.sort(key=lambda one: (None in one[1], -max(self._parts(one[1]))))
        shown = [(short(name, 60), total) for name, total in found[:_MOST]]
        if rest := [total for _, total in found[_MOST:]]:
            both = sum(t[0] or 0.0 for t in rest), sum(t[1] or 0.0 for t in rest)
            shown.append((f"others ({len(rest)})", both))
        return self._compared("Gathers and reductions", shown)

    def _totals(
        self, name: Callable[[Share], str], which: Callable[[Share], bool] = lambda one: True
    ) -> list[tuple[str, Total]]:
        sides: list[dict[str, float]] = []
        for shares in (self.planned, self.recorded.shares):
            sums = defaultdict[str, float](float)
            for one in filter(which, shares):
                sums[name(one)] += one.seconds
            sides.append(sums)
        ours, theirs = sides
        return [(n, (ours.get(n), theirs.get(n))) for n in dict.fromkeys([*ours, *theirs])]

    def _parts(self, total: Total) -> tuple[float, float]:
        sides = [sum(s.seconds for s in side) for side in (self.planned, self.recorded.shares)]
        return fraction(total[0] or 0.0, sides[0]), fraction(total[1] or 0.0, sides[1])

    def _compared(self, title: str, found: Sequence[tuple[str, Total]]) -> Section:
        rows = []
        for name, total in found:
            parts = zip(total, self._parts(total), strict=True)
            shares = ["–" if seconds is None else percent(part, 1) for seconds, part in parts]
            rows.append(
                (name, _ms(total[0]), shares[0], _ms(total[1]), shares[1], _quotient(*total))
            )
        return Section(title, _COLUMNS, tuple(rows))

    def _page(self) -> str:
        from .pictures import canvas, draw_lanes, embed, end_of_last  # imports matplotlib

        report, recorded = self.report, self.recorded
        measured = f"Measured: step {recorded.number + 1} of {recorded.steps}"
        parts = [f"<h1>{escape(self.verdict)}</h1>"]
        parts += [f"<p>{escape(note)}</p>" for note in self.notes()]
        for heading, slots in (("Modelled", report.timing.slots), (measured, recorded.slots)):
            # Timelines share a scale, unless the trace is of CPU ranks.
            same = slots if recorded.on_cpu else [*report.timing.slots, *recorded.slots]
            figure = canvas(11.2, 3.4)
            axes = figure.add_subplot()
            draw_lanes(axes, slots, end_of_last(same))
            axes.set_xlabel("ms")
            parts += [f"<h2>{escape(heading)}</h2>", embed(figure)]
        parts.append(tables(self.sections()))
        return document(f"{report.title or 'xla_fsdp plan'} and {recorded.device}", parts)

    def _trace(self) -> str:
        from .pictures import trace

        slots = {"modelled": self.report.timing.slots, "measured": self.recorded.slots}
        return trace(slots, self.report)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(seconds, 3)


def _quotient(modelled: float | None, measured: float | None) -> str:
    return figure(measured / modelled, 2) if modelled and measured is not None else "–"


def _some(names: Iterable[str]) -> str:
    return join_some([short(name, 40) for name in sorted(names)], 6)
