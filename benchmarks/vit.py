"""The 10-billion-parameter vision transformer on several slices: ``python -m benchmarks.vit``.

Plans ``examples/train_vit.py`` with its defaults (1024 images a step, blocks recomputed) on each
slice, with blocks in one loop, and prints a table. ``--ways ahead`` sets ``scan_prefetch=True``;
``--reshard 16`` sets ``reshard_after_forward=16``. ``--ways singly`` wraps the blocks one by one,
which takes more than 15 GB of memory to compile for v4 and v5e. With one slice and one way it
prints the complete report, and the memory of planning on this machine: that of this process and its
children together.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from xla_fsdp import Report, ShardingSettings
from xla_fsdp.collectives.routes import COLLECTIVE_ROUTES

from .memory import Peak
from .slices import require_slices

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_vit.py"
SLICES = ("v3-128", "v4-128", "v5litepod-256")
WAYS = {"singly": "one by one", "scanned": "one loop", "ahead": "one loop, gathered ahead"}
GIB = 1 << 30
HEAD = (
    "| slice | blocks | ranks | HBM, GiB a device | at its peak | sent / bound | asynchronous, % "
    "| compute, ms | exposed | step, ms (model) | images/s | MFU, % | compiled in, s |"
)


def plan(
    slice_: str, way: str, reshard: bool | int, routes: str, flags: list[str]
) -> tuple[Report, str]:
    """The report of one plan, and its text."""
    with tempfile.TemporaryDirectory() as folder:
        path, how = Path(folder, "plan.json"), "--noscan_blocks"
        if way == "scanned" and reshard is True and routes == "auto":
            how = "--scan_blocks"
        elif way != "singly":
            how = f"--settings={Path(folder, 'settings.json')}"
            settings = ShardingSettings(scan=True, recompute="all", reshard_after_forward=reshard)
            settings = settings.changed(scan_prefetch=way == "ahead", collective_routes=routes)
            settings.save(how.partition("=")[2])
        command = [sys.executable, str(SCRIPT), f"--plan={slice_}", f"--plan_report={path}", *flags]
        done = subprocess.run([*command, how], stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 3):  # 3: does not fit
            sys.exit(done.returncode)
        return Report.load(path), done.stdout


def row(report: Report, way: str, batch: int) -> str:
    moved = sum(c.wire_bytes * c.times for c in report.schedule.collectives if c.asynchronous)
    timing = report.timing
    cells = [
        report.topology,
        WAYS[way],
        report.devices,
        f"{report.memory.required / GIB:.1f} of {report.hbm_capacity / GIB:.1f}",
        f"{report.memory.peak / GIB:.1f}",
        f"{report.wire_ratio:.2f}",
        f"{100 * moved / report.wire_bytes:.0f}",
        f"{timing.compute * 1e3:,.0f}",
        f"{timing.exposed * 1e3:,.0f}",
        f"{timing.step * 1e3:,.0f}",
        f"{batch / timing.step:,.0f}",
        f"{100 * timing.mfu:.0f}",
        f"{report.compile_seconds:.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def resident() -> int:
    """Resident memory of this process and its descendants, in bytes."""
    this, total = psutil.Process(), 0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("slices", nargs="*", default=SLICES, help=f"default: {' '.join(SLICES)}")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: scanned")
    parser.add_argument(
        "--reshard", type=int, default=True, help="reshard_after_forward, with loops"
    )
    parser.add_argument(
        "--routes", default="auto", choices=COLLECTIVE_ROUTES, help="collective_routes, with loops"
    )
    parser.add_argument("--batch_size", type=int, default=1024, help="images a step, of all ranks")
    arguments, flags = parser.parse_known_args()
    require_slices(parser, arguments.slices)
    ways = arguments.ways or ["scanned"]
    rows, text = [], ""
    with Peak(resident, 0.05) as memory:
        for slice_ in arguments.slices:
            for way in ways:
                given = [*flags, f"--batch_size={arguments.batch_size}"]
                report, text = plan(slice_, way, arguments.reshard, arguments.routes, given)
                rows.append(row(report, way, arguments.batch_size))
    print(text if len(rows) == 1 else "\n".join([HEAD, "|---|---" + "|---:" * 11 + "|", *rows]))
    print(f"\nhost memory for planning: {memory.value / 1e9:.1f} GB resident, all processes")


if __name__ == "__main__":
    main()
