"""Gathers in 8 bits: what they save on a slice, and what they cost in loss.

``python -m benchmarks.narrow_gathers plan`` has the TPU compiler compile workload S with
``gather_dtype`` and without, for a v3-8, a v5litepod-8 and a v6e-8: nine programs, of about a
minute each on an idle machine. ``python -m benchmarks.narrow_gathers vit`` trains the ViT of the
examples on scikit-learn's digits, ``... gpt`` their GPT on the texts that come with Python, on two
CPU ranks, computing in bfloat16, with the same seeds and data; a run takes minutes. They are wide
enough for all matrices of their blocks (of the ViT: all but the one behind attention) to travel in
8 bits. Tables go to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import xla_fsdp
from xla_fsdp import Report

from .narrow_training import NETWORKS, RANKS, Losses, train
from .slices import require_slices
from .workload_s import OURS, step_of

RESULTS = Path(__file__).parent / "results"
SLICES = ("v3-8", "v5litepod-8", "v6e-8")
DTYPES = (None, torch.int8, torch.float8_e4m3fn)
MB, MIB = 1e6, 2**20

# label, how to get it from a report
ROWS: list[tuple[str, Callable[[Report], str]]] = [
    ("sent, MB", lambda r: f"{r.wire_bytes / MB:.1f}"),
    ("of which by gathers, MB", lambda r: f"{gathered(r) / MB:.1f}"),
    ("sent / bound", lambda r: f"{r.wire_ratio or 0:.2f}"),
    ("temporaries, MiB", lambda r: f"{r.memory.temporaries / MIB:.0f}"),
    ("HBM required, MiB", lambda r: f"{r.memory.required / MIB:.0f}"),
    ("compute, ms (model)", lambda r: f"{1e3 * r.timing.compute:.2f}"),
    ("collectives, ms (model)", lambda r: f"{1e3 * r.timing.collective:.2f}"),
    ("step, ms (model)", lambda r: f"{1e3 * r.timing.step:.2f}"),
]


def gathered(report: Report) -> float:
    """Bytes that a device sends in gathers of a step."""
    return sum(
        one.wire_bytes * one.times
        for one in report.schedule.collectives
        if (one.asked or one.kind) == "all-gather"
    )


def name_of(dtype: torch.dtype | None) -> str:
    """What a column is called."""
    return "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")


def planned(slices: Sequence[str], dtypes: Sequence[torch.dtype | None], blocks: int) -> str:
    """The table of workload S, with so many blocks."""
    columns: dict[str, Report] = {}
    for slice in slices:
        for dtype in dtypes:
            name = f"{slice}, {name_of(dtype)}"
            print(name, file=sys.stderr, flush=True)
            step = step_of(OURS, blocks=blocks, gather_dtype=dtype)
            columns[name] = xla_fsdp.plan(step, slice, ranks=[0], title=name)
    lines = [
        f"| workload S, {blocks} blocks | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for label, get in ROWS:
        lines.append(f"| {label} | " + " | ".join(map(get, columns.values())) + " |")
    return "\n".join(lines)


def trained(what: str, dtypes: Sequence[torch.dtype | None], steps: int, seed: int) -> str:
    """The table of one network's losses."""
    os.environ["PJRT_DEVICE"] = "CPU"
    columns: dict[str, Losses] = {}
    for dtype in dtypes:
        print(f"{what}, {name_of(dtype)}", file=sys.stderr, flush=True)
        ranks = xla_fsdp.launch(train, (what, dtype, steps, seed), num_devices=RANKS)
        assert ranks is not None  # it is None on a TPU
        columns[name_of(dtype)] = ranks[0]
    (first, *_) = columns.values()
    lines = [f"| {what}, mean loss of steps | " + " | ".join(columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for label in first:
        lines.append(
            f"| {label} | " + " | ".join(f"{c[label]:.4f}" for c in columns.values()) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.narrow_gathers", description=__doc__
    )
    parser.add_argument("what", choices=["plan", *NETWORKS])
    parser.add_argument("--slices", nargs="+", default=list(SLICES), help="default: %(default)s")
    parser.add_argument("--dtypes", nargs="+", default=[name_of(d) for d in DTYPES])
    parser.add_argument("--blocks", type=int, default=2, help="to plan; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="to train; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of parameters to train")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables")
    flags = parser.parse_args()
    require_slices(parser, flags.slices)
    dtypes = [dtype for dtype in DTYPES if name_of(dtype) in flags.dtypes]
    if flags.what == "plan":
        table = planned(flags.slices, dtypes, flags.blocks)
    else:
        table = trained(flags.what, dtypes, flags.steps, flags.seed)
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / f"narrow_gathers_{flags.what}.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
