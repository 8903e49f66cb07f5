"""The report as one self-contained HTML page: without network, libraries or other files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from .amounts import GIB, MB, figure, milliseconds, percent
from .findings import Findings
from .series import Curve, caption, duration, hbm
from .tables import Section, count, sections
from .text import missing, reason, remarks, subtitle

STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; margin: 2em auto; max-width: 1240px;
  padding: 0 1em; color: #1b1b1b; background: #fff }
h1 { font-size: 1.6em; margin: 0 }  h1.fits { color: #00694f }  h1.not { color: #b03a00 }
h2 { font-size: 1.1em; margin: 2em 0 .4em }  p { margin: .2em 0 1em; color: #444 }
svg { width: 100%; height: auto; display: block }
svg text { font-family: "DejaVu Sans", Verdana, system-ui, sans-serif; pointer-events: none }
.tiles { display: flex; flex-wrap: wrap; gap: .5em; margin: 1em 0 }
.tiles div { background: #f3f5f7; border-radius: 6px; padding: .5em .8em }
.tables { display: flex; flex-wrap: wrap; gap: 0 3.5em; align-items: flex-start }
.tiles b { display: block; font-size: 1.35em }
table { border-collapse: collapse; font-size: .9em; font-variant-numeric: tabular-nums }
td, th { padding: .22em .9em .22em 0; text-align: left; border-bottom: 1px solid #e7e7e7 }
.n { text-align: right; white-space: nowrap }  th { color: #666; font-weight: 500 }
.bar { display: inline-block; height: .7em; background: #0072b2; margin-left: .6em }
.barcell { width: 160px }  .warn { background: #fdf0e6; border-left: 4px solid #d55e00;
  padding: .5em 1em; margin: 1em 0 }  .warn ul { margin: .2em 0; padding-left: 1.2em }
.scroll { overflow-x: auto; max-width: 100% }
#tip { position: fixed; pointer-events: none; background: #222; color: #fff; padding: .35em .6em;
  border-radius: 4px; font-size: .85em; white-space: pre; display: none; z-index: 9 }
"""

_SCRIPT = """
const tip = document.getElementById("tip");
const curve = JSON.parse(document.getElementById("curve").textContent);
function readout(part, kind) {
  const axis = curve[kind], at = (part - curve.left) / (curve.right - curve.left);
  let low = 0, high = axis.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (axis[middle] <= at * curve[kind + "End"]) low = middle; else high = middle - 1;
  }
  let text = curve.total[low].toFixed(3) + " GiB in use at place " + curve.places[low] +
    (curve.ms ? " (" + curve.ms[low].toFixed(3) + " ms)" : "");
  for (const [name, values] of Object.entries(curve.stack))
    if (values[low] > 0) text += "\\n  " + values[low].toFixed(3) + " GiB " + name;
  return text;
}
for (const picture of document.querySelectorAll("[data-axis]")) {
  picture.addEventListener("mousemove", event => {
    const spot = event.target.closest("[data-t], .area"), box = picture.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    tip.textContent = spot ? spot.dataset.t || readout(part, picture.dataset.axis) : "";
    tip.style.display = spot ? "block" : "none";
    const room = window.innerWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, room)) + "px";
    tip.style.top = (event.clientY + 16) + "px";
  });
  picture.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}
"""


def page(report: Findings) -> str:
    """The complete page. Every text of the report is escaped."""
    from .pictures import SIDES, memory_svg, timeline_svg  # imports matplotlib

    curve = hbm(report) if report.schedule.curve else None
    verdict = f'<h1 class="{"fits" if report.fits else "not"}">{escape(report.verdict)}</h1>'
    parts = [verdict, *_paragraph(reason(report)), *_paragraph(subtitle(report)), _tiles(report)]
    parts += [f'<div class="warn"><b>Warnings</b>{_list(report.warnings)}</div>'] * bool(
        report.warnings
    )
    if report.suggestions:
        parts += ["<h2>What to change</h2>", _list(report.suggestions)]
    if curve is not None:
        parts += ["<h2>HBM in use over the schedule</h2>", *_paragraph(caption(report))]
        parts += [f'<div data-axis="places">{memory_svg(report)}</div>']
    if curve is not None and not missing(report):
        parts += ["<h2>Timeline of one step: modelled, not measured</h2>"]
        parts += [f'<div data-axis="ms">{timeline_svg(report)}</div>']
    parts += _paragraph(missing(report))
    tables = "".join(table(section) for section in sections(report))
    parts += [f'<div class="tables">{tables}</div>']
    notes = remarks(report)
    parts += ["<h2>Notes</h2>", _list(notes)] if notes else []
    title = f"{report.title or 'xla_fsdp plan'}: {report.topology}"
    return document(title, parts, _readout(report, curve, SIDES))


def document(title: str, parts: Sequence[str], data: Mapping[str, object]) -> str:
    """A page with the elements ``parts``; ``data``: the values that the pointer shows."""
    read = json.dumps(data).replace("<", "\\u003c")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    known = f'<script type="application/json" id="curve">{read}</script>'
    body = "\n".join([*parts, '<div id="tip"></div>', known])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _tiles(report: Findings) -> str:
    collectives = report.schedule.collectives
    waiting = count([c for c in collectives if not c.asynchronous])
    step, mfu = (report.timing.step, report.timing.mfu) if report.timed else (None, None)
    ratio, of = report.wire_ratio, f"of {report.hbm_capacity / GIB:.2f} required"
    tiles = [
        (figure(report.memory.required / GIB if report.sized else None, 2, "GiB"), of),
        (percent(report.headroom if report.sized else None), "headroom"),
    ]
    if report.placed:
        tiles += [
            (figure(report.wire_bytes / MB, 0, "MB"), "sent by a device a step"),
            (figure(ratio, 2, "×"), "of the ZeRO-3 bound"),
            (f"{waiting} of {count(collectives)}", "collectives synchronous"),
            (milliseconds(step, 1), "a step (model)"),
            (percent(mfu, 1), "MFU (model)"),
        ]
    cells = "".join(f"<div><b>{escape(big)}</b>{escape(small)}</div>" for big, small in tiles)
    return f'<div class="tiles">{cells}</div>'


def _paragraph(text: str) -> list[str]:
    return [f"<p>{escape(text)}</p>"] if text else []


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def table(section: Section) -> str:
    """A table; it also shows the column ``section.bars`` as bars."""
    bars = section.columns.index(section.bars) + 1 if section.bars else None
    numeric = section.numeric()
    sizes = [float(row[bars].replace(",", "")) for row in section.rows] if bars else []
    most = max(
        (s for s, row in zip(sizes, section.rows, strict=False) if row[0] != "total"), default=0
    )
    head = "".join(
        f"<th{' class=n' if i and numeric[i] else ''}>{escape(c)}</th>" + "<th></th>" * (i == bars)
        for i, c in enumerate(("", *section.columns))
    )
    lines = []
    for number, row in enumerate(section.rows):
        cells = []
        for i, cell in enumerate(row):
            cells.append(f"<td{' class=n' if i and numeric[i] else ''}>{escape(cell)}</td>")
            if i == bars:
                size = 0 if row[0] == "total" or not most else 140 * sizes[number] / most
                bar = f'<span class="bar" style="width:{size:.0f}px"></span>' if size else ""
                cells.append(f'<td class="barcell">{bar}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table><tr>{head}</tr>{''.join(lines)}</table>"
    return f'<div class="scroll"><h2>{escape(section.title)}</h2>{table}</div>'


def _readout(
    report: Findings, curve: Curve | None, sides: tuple[float, float]
) -> dict[str, object]:
    """The values that are shown when the pointer is over the pictures."""
    if curve is None:
        return {}
    stack = {n: [round(float(v) / GIB, 3) for v in values] for n, values in curve.stack.items()}
    timed = {
        "ms": [round(1e3 * float(s), 3) for s in curve.seconds],
        "msEnd": 1e3 * duration(report),
    }
    return {
        "left": sides[0],
        "right": sides[1],
        "places": [int(p) for p in curve.places],
        "placesEnd": report.schedule.length,
        "total": [round(float(v) / GIB, 3) for v in curve.total],
        "stack": stack,
        **({} if missing(report) else timed),
    }
