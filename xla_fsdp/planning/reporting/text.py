"""The report as text: its tables, aligned, with notes and warnings below."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from .amounts import MB_MEANS, short
from .findings import Findings
from .tables import Section, aligned, sections

_COLUMN = 66  # characters of the last column in a line
_PREFIX = re.compile(r"^[A-Z_]+: (XLA:TPU compile permanent error\. )?")


def text(report: Findings) -> str:
    """The complete report, in lines of about 100 characters."""
    lines = [report.verdict]
    lines += textwrap.wrap(reason(report), 100)
    lines += [subtitle(report)]
    for section in sections(report):
        lines += ["", *_lines(section)]
    for heading, texts in (
        ("Notes", remarks(report)),
        ("Warnings", report.warnings),
        ("What to change", report.suggestions),
    ):
        lines += ["", heading, *_listed(texts)] if texts else []
    return "\n".join(lines)


def subtitle(report: Findings) -> str:
    """The title, and the slice of the plan."""
    what = f"{report.title}: " if report.title else ""
    return f"{what}{report.topology}, {report.devices} devices ({report.chip})"


def reason(report: Findings) -> str:
    """The beginning of the compiler's message if the step does not fit; else ""."""
    first = report.refusal.strip().partition("\n\n")[0]
    return short(" ".join(_PREFIX.sub("", first).split()), 300)


def missing(report: Findings) -> str:
    """Why there is no timeline or no picture at all; "" if there are both."""
    if not report.schedule.curve:
        refused = "the compiler stopped before it assigned buffers" if report.refusal else ""
        return f"Nothing to draw: {refused or 'the schedule is empty'}."
    if not report.timed and report.refusal:
        return "No timeline: the compiler stopped before it estimated any times."
    if not report.timed or not report.timing.slots:
        return "No timeline: the compiler estimated no times."
    return ""


def remarks(report: Findings) -> list[str]:
    """All notes: assumptions, and remarks on the figures."""
    notes = [*report.notes, *report.schedule.notes]
    if report.schedule.collectives:
        notes.append(f"Interconnect model: {report.link_model.removeprefix('Model: ')}")
        notes.append(f"MB are {MB_MEANS}; KiB, MiB and GiB are powers of 1024.")
    return notes


def _lines(section: Section) -> list[str]:
    """The table as lines; the text of the last column is wrapped."""
    table = [(section.title, *section.columns)]
    for row in section.rows:
        first, *more = textwrap.wrap(row[-1], _COLUMN) or [""]
        table.append((f"  {row[0]}", *row[1:-1], first))
        table += [("",) * (len(row) - 1) + (line,) for line in more]
    return aligned(table, [False, *section.numeric()[1:]])


def _listed(texts: Sequence[str]) -> list[str]:
    """Sentences as a list, in lines of at most 100 characters."""
    wrapped = [
        textwrap.wrap(one, 100, initial_indent="  * ", subsequent_indent="    ") for one in texts
    ]
    return [line for lines in wrapped for line in lines]
