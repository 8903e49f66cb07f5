"""The memory that ``offload=True`` saves: ``python -m benchmarks.offloaded``.

Plans blocks of one linear layer, whose inputs have 1.5 GiB each, checkpointed one by one or
scanned, with and without ``offload=True``, for a v5litepod-8; no TPU is needed. The table is
written to ``benchmarks/results/offloaded.md``.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp
from xla_fsdp import Report, checkpoint_module, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

from .slices import require_slices

RESULTS = Path(__file__).parent / "results"
WIDTH, ROWS_OF_TOKENS, TOKENS = 512, 768, 2048
GIB = 2**30

# label, how to get it from a report
ROWS: list[tuple[str, Callable[[Report], str]]] = [
    ("fits", lambda r: "yes" if r.fits else "no"),
    ("live peak, GiB of HBM", lambda r: f"{max(r.schedule.curve) / GIB:.2f}"),
    ("host memory, GiB", lambda r: f"{r.memory.host_temporaries / GIB:.2f}"),
    ("copied to the host, GB a step", lambda r: f"{r.schedule.to_host / 1e9:.2f}"),
    ("copied back, GB a step", lambda r: f"{r.schedule.to_device / 1e9:.2f}"),
    ("compute, ms (model)", lambda r: f"{1e3 * r.timing.compute:.1f}" if r.timed else "-"),
]


class Block(nn.Module):
    """A linear layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x))


def step(depth: int, scanned: bool, offload: bool) -> None:
    """One SGD step of ``depth`` blocks after a linear layer."""
    wrap = functools.partial(FSDP, compute_dtype=torch.bfloat16)
    blocks = [Block() for _ in range(depth)]
    if scanned:
        inner = scan_blocks(blocks, compute_dtype=torch.bfloat16, offload=offload)
    else:
        inner = nn.Sequential(*(wrap(checkpoint_module(b, offload=offload)) for b in blocks))
    model = wrap(nn.Sequential(nn.Linear(128, WIDTH), inner))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(ROWS_OF_TOKENS, TOKENS, 128).to("xla")
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offloaded", description=__doc__)
    parser.add_argument("slice", nargs="?", default="v5litepod-8", help="default: %(default)s")
    parser.add_argument("--depth", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table")
    flags = parser.parse_args()
    require_slices(parser, [flags.slice])
    columns: dict[str, Report] = {}
    for scanned in (False, True):
        for offload in (False, True):
            name = f"{'scanned' if scanned else 'singly'}{', offload' if offload else ''}"
            print(f"{name} on {flags.slice}", file=sys.stderr)
            one = functools.partial(step, flags.depth, scanned, offload)
            columns[name] = xla_fsdp.plan(one, flags.slice, ranks=[0], title=name)
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for label, get in ROWS:
        lines.append(f"| {label} | " + " | ".join(map(get, columns.values())) + " |")
    flags.out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(lines)
    (flags.out / "offloaded.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
