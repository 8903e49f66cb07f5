"""Compare a plan with a recorded trace of the same step: modelled and measured times, as text and
as a self-contained page with both timelines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from ...wording import join_some
from ..compiling.cache import write_whole
from ..recorded.trace import RecordedStep, Share
from ..records import KINDS, PHASES, Slot
from .amounts import figure, milliseconds, percent, share, short, units
from .findings import Findings
from .page import document, table
from .series import duration, timeline
from .storage import target_of_page
from .tables import Section, aligned

_CPU_NOTE = (
    "Recorded on CPU ranks: compare only which operations there are, their order and their shares. "
    "Milliseconds and ratios are not those of a TPU. On CPU ranks each parameter has a separate "
    "collective; on a TPU the small parameters of a unit share one: compare collectives by unit."
)
_COLUMNS = ("modelled", "share", "measured", "share", "ratio")
_MOST = 24  # collectives in the table
_SHOWN = 6  # names in a sentence
Total = tuple[float | None, float | None]  # seconds modelled and measured

_WIDTH, _HEIGHT = 12.5, 3.4  # inches of each timeline


@dataclass(frozen=True)
class Beside:
    """A plan compared with a recorded step: ``print`` it, or ``plot`` it as a page.

    Both are matched by the names of modules and parameters.

    Raises:
        ValueError: they have no name in common, so the trace is of another model.
    """

    report: Findings
    recorded: RecordedStep
    planned: tuple[Share, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "planned", tuple(_planned_shares(self.report)))
        ours, theirs = {s.module for s in self.planned} - {""}, self.recorded.modules
        if not ours & theirs:
            raise ValueError(
                f"{self.recorded.source}: is of another model than the plan: its modules are "
                f"{_some(theirs)}; those of the plan are {_some(ours) or 'unknown'}"
            )

    @property
    def verdict(self) -> str:
        """The result in one line."""
        step, found = self.report.timing.step, self.recorded.seconds
        return (
            f"A step on {self.recorded.device} took {milliseconds(found)}; modelled for "
            f"{self.report.topology}: {milliseconds(step)} ({_ratio(step, found)} ×)"
        )

    def notes(self) -> list[str]:
        """Remarks on the figures."""
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
        """All tables that are not empty."""
        tables = [self._step(), self._by_kind(), self._by_unit(), self._collectives()]
        return [table for table in tables if table.rows]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page with both timelines and the tables.

        Raises:
            ValueError: the path does not end in .html.
            FileNotFoundError: there is no such folder.
            MissingExtraError: (an ImportError) matplotlib is not installed.
        """
        write_whole(target_of_page(path), _page(self).encode())

    def __str__(self) -> str:
        lines = [self.verdict]
        for section in self.sections():
            table = [(section.title, *section.columns)]
            table += [(f"  {row[0]}", *row[1:]) for row in section.rows]
            lines += ["", *aligned(table, [False] + [True] * len(section.columns))]
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
        cells = [(name, _ms(a), _ms(b), _ratio(a, b)) for name, a, b in rows]
        return Section("A step", ("modelled", "measured", "ratio"), tuple(cells))

    def _by_kind(self) -> Section:
        found = self._totals(_kind, self.planned, self.recorded.shares)
        order = [f"{p or 'other'} compute" for p in PHASES]
        order += [f"{kind}, {p or 'other'}" for kind in KINDS for p in PHASES]
        named = sorted(found.items(), key=lambda one: order.index(one[0]))
        return Section("By kind", _COLUMNS, tuple((name, *self._cells(t)) for name, t in named))

    def _by_unit(self) -> Section:
        both = (*self.planned, *self.recorded.shares)
        unit = units(s.module for s in both)

        def name(one: Share) -> str:
            what = "compute" if one.kind == "compute" else "collectives"
            return f"{unit[one.module] or '(no module)'}: {what}"

        found = self._totals(name, self.planned, self.recorded.shares)
        order = {one: place for place, one in enumerate(dict.fromkeys(map(_unit_of, found)))}
        ranked = sorted(found.items(), key=lambda one: order[_unit_of(one[0])])
        return Section("By unit", _COLUMNS, tuple((n, *self._cells(t)) for n, t in ranked))

    def _collectives(self) -> Section:
        def moved(shares: Sequence[Share]) -> list[Share]:
            return [s for s in shares if s.kind != "compute"]

        found = self._totals(
            lambda s: f"{s.kind}, {s.phase or 'other'}: {s.module or '(no module)'}",
            moved(self.planned), moved(self.recorded.shares),
        )  # fmt: skip
        # Those that both have first, then by their share of the step.
        ranked = sorted(found.items(), key=lambda one: (None in one[1], -max(self._parts(one[1]))))
        rows = [(short(name, 60), *self._cells(total)) for name, total in ranked[:_MOST]]
        rest = [total for _, total in ranked[_MOST:]]
        if rest:
            sums = [sum(t[side] or 0.0 for t in rest) for side in (0, 1)]
            rows.append((f"others ({len(rest)})", *self._cells((sums[0], sums[1]))))
        return Section("Gathers and reductions", _COLUMNS, tuple(rows))

    def _totals(
        self, name: Callable[[Share], str], planned: Iterable[Share], measured: Iterable[Share]
    ) -> dict[str, Total]:
        """Seconds by name, in the order of the plan; ``None`` if one side has no such name."""
        sides: list[dict[str, float]] = []
        for shares in (planned, measured):
            sums: dict[str, float] = {}
            for one in shares:
                sums[name(one)] = sums.get(name(one), 0.0) + one.seconds
            sides.append(sums)
        ours, theirs = sides
        return {n: (ours.get(n), theirs.get(n)) for n in dict.fromkeys([*ours, *theirs])}

    def _parts(self, total: Total) -> tuple[float, float]:
        """The shares of ``total`` in all modelled and in all measured seconds."""
        sides = [sum(s.seconds for s in side) for side in (self.planned, self.recorded.shares)]
        return share(total[0] or 0.0, sides[0]), share(total[1] or 0.0, sides[1])

    def _cells(self, total: Total) -> tuple[str, ...]:
        parts = zip(total, self._parts(total), strict=True)
        shares = ["–" if seconds is None else percent(part, 1) for seconds, part in parts]
        return _ms(total[0]), shares[0], _ms(total[1]), shares[1], _ratio(*total)


def _planned_shares(report: Findings) -> list[Share]:
    """The modelled time of each instruction of a plan in a step."""
    once: dict[tuple[int, str], float] = {}
    for slot in report.timing.slots:
        once.setdefault((slot.index, slot.label), slot.end - slot.begin)
    shares = []
    for op in report.schedule.ops:
        seconds = once.get((op.index, op.name), 0.0) * op.times
        if seconds:
            shares.append(Share("compute", op.phase, op.module, seconds))
    for c in report.schedule.collectives:
        seconds = once.get((c.index, c.name), 0.0) * c.times
        waited = 0.0 if c.asynchronous else seconds
        shares.append(Share(c.asked or c.kind, c.phase, c.module, seconds, waited))
    return shares


def _kind(one: Share) -> str:
    phase = one.phase or "other"
    return f"{phase} compute" if one.kind == "compute" else f"{one.kind}, {phase}"


def _unit_of(row: str) -> str:
    return row.rpartition(": ")[0]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(seconds, 3)


def _ratio(modelled: float | None, measured: float | None) -> str:
    return figure(measured / modelled, 2) if modelled and measured is not None else "–"


def _some(names: Iterable[str]) -> str:
    """The first names, and the number of the others."""
    return join_some([short(name, 40) for name in sorted(names)], _SHOWN)


def _page(both: Beside) -> str:
    """The complete page. Every text is escaped."""
    report, recorded = both.report, both.recorded
    parts = [f"<h1>{escape(both.verdict)}</h1>"]
    parts += [f"<p>{escape(note)}</p>" for note in both.notes()]
    modelled, measured = 1e3 * duration(report), _end(recorded.slots)
    # Both timelines have the same scale, unless the trace is of CPU ranks.
    common = max(modelled, measured) if not recorded.on_cpu else 0.0
    for heading, slots, end in (
        ("Modelled", report.timing.slots, modelled),
        (f"Measured: step {recorded.number + 1} of {recorded.steps}", recorded.slots, measured),
    ):
        parts += [f"<h2>{escape(heading)}</h2>"]
        parts += [f'<div data-axis="ms">{_timeline(slots, common or end)}</div>']
    tables = "".join(table(section) for section in both.sections())
    parts += [f'<div class="tables">{tables}</div>']
    title = f"{report.title or 'xla_fsdp plan'} and {recorded.device}"
    return document(title, parts, {})


def _end(slots: Sequence[Slot]) -> float:
    return 1e3 * max((slot.end for slot in slots), default=0.0)


def _timeline(slots: Sequence[Slot], end: float) -> str:
    from .drawing import canvas, svg  # imports matplotlib, which printing does not need
    from .pictures import SIDES, draw_lanes

    figure = canvas(_WIDTH, _HEIGHT)
    axes = figure.add_axes((SIDES[0], 0.14, SIDES[1] - SIDES[0], 0.74))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, end)
    axes.set_xlabel("ms")
    draw_lanes(axes, timeline(slots, end), end)
    return svg(figure)
