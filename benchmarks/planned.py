"""Side by side with torch_xla's own FSDP on the TPU compiler: ``python -m benchmarks.planned``.

Plans workload S with both classes for several slices; no TPU is needed. A compilation takes half a
minute to three minutes on two cores; results are cached. Table and pictures go to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import xla_fsdp
from xla_fsdp import Report

from .workload_s import IN_TREE, OURS, step_of

RESULTS = Path(__file__).parent / "results"
SLICES = ("v3-8", "v5litepod-8", "v6e-8")
MB, MIB = 1e6, 2**20

# label, how to get it from a report, decimals
ROWS: list[tuple[str, Callable[[Report], float], int]] = [
    ("bytes sent, MB a device", lambda r: r.wire_bytes / MB, 1),
    ("bytes sent / ZeRO-3 bound", lambda r: r.wire_ratio, 2),
    ("of them beside compute, %", lambda r: 100 * _beside(r), 0),
    ("synchronous collectives", lambda r: _synchronous(r), 0),
    ("temporaries, MiB of HBM", lambda r: r.memory.temporaries / MIB, 0),
    ("HBM required, MiB", lambda r: r.memory.required / MIB, 0),
    ("compute, million cycles", lambda r: _cycles(r) / 1e6, 1),
    ("step time, ms (model)", lambda r: 1e3 * r.timing.step, 1),
    ("MFU, % (model)", lambda r: 100 * r.timing.mfu, 1),
    ("executables of 3 ranks", lambda r: r.executables, 0),
    ("compile time, s", lambda r: r.compile_seconds, 0),
]


def _beside(report: Report) -> float:
    some = report.schedule.collectives
    beside = sum(c.wire_bytes * c.times for c in some if c.asynchronous or c.fused)
    return beside / report.wire_bytes if report.wire_bytes else 0.0


def _synchronous(report: Report) -> int:
    return sum(c.times for c in report.schedule.collectives if not c.asynchronous)


def _cycles(report: Report) -> int:
    return sum(op.cycles * op.times for op in report.schedule.ops)


def markdown(reports: dict[str, dict[str, Report]]) -> str:
    """A column a slice and class, a row a figure."""
    names = [(where, name) for where in reports for name in (OURS, IN_TREE)]
    lines = [
        "| | " + " | ".join(f"{where}<br>{name}" for where, name in names) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for label, get, decimals in ROWS:
        cells = [f"{get(reports[where][name]):,.{decimals}f}" for where, name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__)
    parser.add_argument("slices", nargs="*", default=SLICES, help="default: %(default)s")
    parser.add_argument("--checkpoint", action="store_true", help="rematerialise every block")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for table and pictures")
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    stem = "planned-S-checkpoint" if flags.checkpoint else "planned-S"
    reports: dict[str, dict[str, Report]] = {}
    for where in flags.slices:
        for name in (OURS, IN_TREE):
            print(f"{name} on {where}", file=sys.stderr)
            report = xla_fsdp.plan(
                step_of(name, flags.checkpoint), where, title=f"workload S, {name}"
            )
            reports.setdefault(where, {})[name] = report
        reports[where][OURS].plot(flags.out / f"{stem}-{where}.png")
    table = markdown(reports)
    (flags.out / f"{stem}.md").write_text(table + "\n")
    figures = {
        where: {name: {row[0]: row[1](one) for row in ROWS} for name, one in by_name.items()}
        for where, by_name in reports.items()
    }
    (flags.out / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(table)


if __name__ == "__main__":
    main()
