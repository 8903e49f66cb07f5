"""The report as one HTML page that needs nothing else: no network, no library, no other file."""

from __future__ import annotations

from html import escape

from ..planning.reporting.page import STYLE, table
from .findings import CPU_NOTE, Measured
from .pictures import collectives_svg, steps_svg
from .records import Status
from .tables import sections

_MORE = """
.ok { color: #00694f } .different { color: #8a6100 } .failed { color: #b03a00; font-weight: 600 }
.skipped { color: #777 }
"""


def page(found: Measured) -> str:
    """The whole page. Every text is escaped."""
    heading = f'<h1 class="{"fits" if found.ok else "not"}">{escape(found.verdict)}</h1>'
    parts = [heading]
    parts += [f"<p>{escape(CPU_NOTE)}</p>"] * (found.where.family == "cpu")
    parts.append("<h2>What is as promised, and what is not</h2>")
    rows = "".join(
        f'<tr><td class="{_class(f.status)}">{escape(f.status.value)}</td>'
        + "".join(f"<td>{escape(text)}</td>" for text in (f.name, f.found, f.promised, f.remedy))
        + "</tr>"
        for f in found.findings
    )
    head = "<tr><th></th><th></th><th>found</th><th>promised</th><th>remedy</th></tr>"
    parts.append(f'<div class="scroll"><table>{head}{rows}</table></div>')
    if found.collectives:
        note = "Lines: measured; dashed: modelled from published figures."
        parts += ["<h2>Collectives by size</h2>", f"<p>{note}</p>", collectives_svg(found)]
    if found.steps:
        parts += ["<h2>Steps</h2>", steps_svg(found)]
    tables = "".join(table(section) for section in sections(found))
    parts.append(f'<div class="tables">{tables}</div>')
    body = "\n".join(parts)
    style = f"<style>{STYLE}{_MORE}</style>"
    head = f'<meta charset="utf-8"><title>xla_fsdp verification</title>{style}'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _class(status: Status) -> str:
    return status.name.lower()
