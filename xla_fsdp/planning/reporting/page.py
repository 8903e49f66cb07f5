"""The report as one self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ... import extras
from .tables import Section, reason, remarks, sections, subtitle, why_no_pictures

if TYPE_CHECKING:
    from .report import Report

_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; margin: 2em auto; max-width: 1240px;
  padding: 0 1em; color: #1b1b1b; background: #fff }
h1 { font-size: 1.6em; margin: 0 }  h1.fits { color: #00694f }  h1.not { color: #b03a00 }
h2 { font-size: 1.1em; margin: 2em 0 .4em }  p { margin: .2em 0 1em; color: #444 }
img { width: 100%; height: auto; display: block }
.tables { display: flex; flex-wrap: wrap; gap: 0 3.5em; align-items: flex-start }
table { border-collapse: collapse; font-size: .9em; font-variant-numeric: tabular-nums }
td, th { padding: .22em .9em .22em 0; text-align: left; border-bottom: 1px solid #e7e7e7 }
.n { text-align: right; white-space: nowrap }  th { color: #666; font-weight: 500 }
.warn { background: #fdf0e6; border-left: 4px solid #d55e00; padding: .5em 1em; margin: 1em 0 }
.warn ul { margin: .2em 0; padding-left: 1.2em }  .scroll { overflow-x: auto; max-width: 100% }
"""


def page(report: Report) -> str:
    from .pictures import draw, embed  # imports matplotlib

    parts = [f'<h1 class="{"fits" if report.fits else "not"}">{escape(report.verdict)}</h1>']
    parts += [f"<p>{escape(text)}</p>" for text in (reason(report), subtitle(report)) if text]
    if report.warnings:
        parts.append(f'<div class="warn"><b>Warnings</b>{_list(report.warnings)}</div>')
    if report.suggestions:
        parts += ["<h2>What to change</h2>", _list(report.suggestions)]
    if report.schedule.curve:
        parts.append(embed(draw(report)))
    if why_no_pictures(report):
        parts.append(f"<p>{escape(why_no_pictures(report))}</p>")
    parts.append(tables(sections(report)))
    notes = remarks(report)
    parts += ["<h2>Notes</h2>", _list(notes)] if notes else []
    return document(f"{report.title or 'xla_fsdp plan'}: {report.topology}", parts)


def document(title: str, parts: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def tables(shown: Sequence[Section]) -> str:
    return f'<div class="tables">{"".join(map(_table, shown))}</div>'


def _table(section: Section) -> str:
    kinds = ["", *(" class=n" if numeric else "" for numeric in section.numeric()[1:])]
    lines = []
    for tag, row in [("th", ("", *section.columns)), *(("td", row) for row in section.rows)]:
        cells = zip(kinds, row, strict=True)
        lines.append("".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in cells))
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><h2>{escape(section.title)}</h2><table>{rows}</table></div>'


def require_parent(path: str | os.PathLike[str]) -> Path:
    """``path``; raises OSError if it is a folder, or if its own folder is missing or read-only."""
    place = Path(path)
    if not place.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: make the folder {place.parent} first")
    if place.is_dir():
        raise IsADirectoryError(f"cannot write {place}: it is a folder; name a file in it")
    if not os.access(place.parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: {place.parent} is read-only; name another")
    return place


def target_of_plot(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """Raises ValueError, FileNotFoundError or MissingExtraError if the path cannot be written."""
    place = require_parent(path)
    if not place.name.lower().endswith(tuple(suffixes)):
        allowed = ", ".join(suffixes)
        raise ValueError(f"cannot plot to {str(path)!r}: allowed are {allowed}; rename the file")
    extras.require_extra("plan", "a plot", ("matplotlib",))
    return place
