"""The cost of depth, with and without ``scan_blocks``: ``python -m benchmarks.depth``.

Plans 4 and 32 blocks of workload S, checkpointed one by one or scanned, for a v3-8; no TPU is
needed. 32 single blocks take minutes to compile; results are cached. The table is written to
``benchmarks/results/depth.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import xla_fsdp
from xla_fsdp import Report

from .model import Block
from .slices import require_slices
from .workload_s import Network

RESULTS = Path(__file__).parent / "results"
DEPTHS = (4, 32)
MB, MIB = 1e6, 2**20

# label, how to get it from a report, decimals
ROWS: list[tuple[str, Callable[[Report], float], int]] = [
    ("compile time, s", lambda r: r.compile_seconds, 0),
    ("program, MiB", lambda r: r.program_bytes / MIB, 1),
    ("bytes sent, MB a device", lambda r: r.wire_bytes / MB, 1),
    ("bytes sent / ZeRO-3 bound", lambda r: r.wire_ratio, 2),
    ("peak less arguments, MiB of HBM", lambda r: _temporaries(r) / MIB, 0),
    ("temporaries as the runtime states them, MiB", lambda r: r.memory.temporaries / MIB, 0),
    ("HBM required, MiB", lambda r: r.memory.required / MIB, 0),
    ("compute, million cycles", lambda r: sum(o.cycles * o.times for o in r.schedule.ops) / 1e6, 1),
    ("step time, ms (model)", lambda r: 1e3 * r.timing.step, 1),
]


def _temporaries(report: Report) -> int:
    return report.memory.peak - report.memory.arguments


class Scanned(Network):
    """Workload S with its blocks in ``scan_blocks``."""

    def __init__(self, depth: int, width: int):
        super().__init__(lambda block: block, 0, width)
        self.blocks = xla_fsdp.scan_blocks(
            (Block(width, 16, causal=False) for _ in range(depth)), compute_dtype=torch.bfloat16
        )


def step_of(depth: int, scanned: bool, width: int, batch: int, traced: list[float]):
    """A function that builds the model, trains a step, and appends the seconds of tracing."""

    def step() -> torch.Tensor:
        from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

        def wrap(module: nn.Module) -> nn.Module:
            return XlaFullyShardedDataParallel(module, compute_dtype=torch.bfloat16)

        if scanned:
            model = wrap(Scanned(depth, width))
        else:
            model = wrap(Network(lambda block: wrap(checkpoint_module(block)), depth, width))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inputs = torch.randn(batch, 256, width).to("xla")
        began = time.perf_counter()
        loss = model(inputs).float().square().mean()
        loss.backward()
        traced.append(time.perf_counter() - began)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def markdown(columns: dict[str, dict[str, float]]) -> str:
    """A table with a column for each depth and way, and a row for each figure."""
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    decimals = {label: digits for label, _, digits in ROWS}
    for label in next(iter(columns.values())):
        cells = [f"{figures[label]:,.{decimals.get(label, 0)}f}" for figures in columns.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description=__doc__)
    parser.add_argument("slice", nargs="?", default="v3-8", help="default: %(default)s")
    parser.add_argument("--width", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="per device; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table")
    flags = parser.parse_args()
    require_slices(parser, [flags.slice])
    columns: dict[str, dict[str, float]] = {}
    for scanned in (False, True):
        for depth in DEPTHS:
            name = f"{depth} blocks, {'scanned' if scanned else 'singly'}"
            print(f"{name} on {flags.slice}", file=sys.stderr)
            traced: list[float] = []
            step = step_of(depth, scanned, flags.width, flags.batch, traced)
            report = xla_fsdp.plan(step, flags.slice, ranks=[0, 1, 7], title=name)
            columns[name] = {label: get(report) for label, get, _ in ROWS}
            columns[name]["tracing forward and backward, ms"] = 1e3 * min(traced)
    flags.out.mkdir(parents=True, exist_ok=True)
    table = markdown(columns)
    (flags.out / "depth.md").write_text(table + "\n")
    (flags.out / "depth.json").write_text(json.dumps(columns, indent=1) + "\n")
    print(table)


if __name__ == "__main__":
    main()
