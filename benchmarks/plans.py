"""Compare plans of one model, sharded in several ways: ``python -m benchmarks.plans TABLE``.

Tables: ``depth`` (4 and 32 blocks, one by one or in one loop), ``offload`` (inputs of recomputed
blocks in HBM or on the host), ``slices`` (workload S over two slices that a network joins). No TPU
is needed. A compilation takes half a minute to a few minutes; results are cached.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from xla_fsdp import Report, ShardingStrategy, checkpoint_module, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.comm_hooks import bf16_compress_hook

from .model import Block
from .tables import GIB, MB, MIB, Table, cycles, head, line, plan_of, require_slices
from .workload_s import OURS, scanned_step, step_of


class Residual(nn.Module):
    """A linear layer with a residual connection: a block whose input is large."""

    WIDTH, SEQUENCES, TOKENS = 512, 768, 2048  # 1.5 GiB in bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(self.WIDTH, self.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x))


def offloaded_step(scanned: bool, offload: bool, depth: int = 8) -> None:
    """One SGD step of ``depth`` blocks after a linear layer."""
    wrap = partial(FSDP, compute_dtype=torch.bfloat16)
    blocks = [Residual() for _ in range(depth)]
    if scanned:
        inner = scan_blocks(blocks, compute_dtype=torch.bfloat16, offload=offload)
    else:
        inner = nn.Sequential(*(wrap(checkpoint_module(b, offload=offload)) for b in blocks))
    model = wrap(nn.Sequential(nn.Linear(128, Residual.WIDTH), inner))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(Residual.SEQUENCES, Residual.TOKENS, 128).to("xla")
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def narrow_replicas(model: FSDP) -> None:
    """Sums gradients over the replicas in bfloat16."""
    model.register_comm_hook(None, bf16_compress_hook, over="replicas")


def sent(report: Report, across_slices: bool, asynchronous: bool | None = None) -> float:
    """MB that a device sends in a step, within its slice or to others."""
    return (
        sum(
            c.wire_bytes * c.times
            for c in report.schedule.collectives
            if c.across_slices is across_slices and asynchronous in (None, c.asynchronous)
        )
        / MB
    )


def number_across(report: Report) -> int:
    return sum(c.times for c in report.schedule.collectives if c.across_slices)


TABLES = {
    "depth": Table(
        ("v3-8",),
        {
            "4 singly": plan_of(step_of(OURS, checkpoint=True, blocks=4)),
            "32 singly": plan_of(step_of(OURS, checkpoint=True, blocks=32)),
            "4 scanned": plan_of(scanned_step(4, kind=Block)),
            "32 scanned": plan_of(scanned_step(32, kind=Block)),
        },
        {
            "compile time, s": lambda r: f"{r.compile_seconds:.0f}",
            "program, MiB": lambda r: f"{r.program_bytes / MIB:.1f}",
            "bytes sent, MB a device": lambda r: f"{r.wire_bytes / MB:,.1f}",
            "bytes sent / bound": lambda r: f"{r.wire_ratio:.2f}",
            "peak less arguments, MiB of HBM": lambda r: (
                f"{(r.memory.peak - r.memory.arguments) / MIB:,.0f}"
            ),
            "HBM required, MiB": lambda r: f"{r.memory.required / MIB:,.0f}",
            "compute, million cycles": lambda r: f"{cycles(r) / 1e6:,.1f}",
            "step time, ms (model)": lambda r: f"{1e3 * r.timing.step:,.1f}",
        },
    ),
    "offload": Table(
        ("v5litepod-8",),
        {
            "singly": plan_of(partial(offloaded_step, scanned=False, offload=False)),
            "singly, offload": plan_of(partial(offloaded_step, scanned=False, offload=True)),
            "scanned": plan_of(partial(offloaded_step, scanned=True, offload=False)),
            "scanned, offload": plan_of(partial(offloaded_step, scanned=True, offload=True)),
        },
        {
            "fits": lambda r: "yes" if r.fits else "no",
            "live peak, GiB of HBM": lambda r: f"{max(r.schedule.curve) / GIB:.2f}",
            "host memory, GiB": lambda r: f"{r.memory.host_temporaries / GIB:.2f}",
            "copied to the host, GB a step": lambda r: f"{r.schedule.to_host / 1e9:.2f}",
            "copied back, GB a step": lambda r: f"{r.schedule.to_device / 1e9:.2f}",
            "compute, ms (model)": lambda r: f"{1e3 * r.timing.compute:.1f}" if r.timed else "-",
        },
    ),
    "slices": Table(
        ("2xv5litepod-8",),
        {
            "the default": plan_of(step_of(OURS)),
            "the default, replicas in bfloat16": plan_of(step_of(OURS, prepare=narrow_replicas)),
            "FULL_SHARD over all": plan_of(
                step_of(OURS, sharding_strategy=ShardingStrategy.FULL_SHARD)
            ),
        },
        {
            "within slices, MB": lambda r: f"{sent(r, False):.1f}",
            "between, MB": lambda r: f"{sent(r, True):.1f}",
            "collectives between": lambda r: f"{number_across(r)}",
            "of these asynchronous, %": lambda r: (
                f"{100 * sent(r, True, True) / sent(r, True):.0f}"
            ),
            "HBM, MiB": lambda r: f"{r.memory.required / MIB:,.0f}",
            "collectives, ms": lambda r: f"{1e3 * r.timing.collective:.1f}",
            "step, ms": lambda r: f"{1e3 * r.timing.step:.1f}",
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("slice", nargs="?", help="default: that of the table in docs/")
    arguments = parser.parse_args()
    table = TABLES[arguments.table]
    slices = [arguments.slice or table.slices[0]]
    require_slices(parser, slices)
    columns = {name: report for _, name, report in table.reports(slices)}
    print(head(["", *columns]))
    for label, figure in table.figures.items():
        print(line([label, *map(figure, columns.values())]))


if __name__ == "__main__":
    main()
