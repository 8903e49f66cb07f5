"""Bytes sent over the data-center network: ``python -m benchmarks.several_slices [SLICES]``.

Plans workload S for two slices, by default 2xv5litepod-8, in three ways: sharded within each slice
and replicated over them, which is the default; the same with gradients summed over replicas in
bfloat16 (a communication hook); and sharded over all ranks. No TPU is needed; each takes a minute
or two to compile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import xla_fsdp
from xla_fsdp import Report, ShardingStrategy
from xla_fsdp.comm_hooks import bf16_compress_hook

from .slices import require_slices
from .workload_s import OURS, step_of

MB = 1e6


def narrow_replicas(model: xla_fsdp.XlaFullyShardedDataParallel) -> None:
    model.register_comm_hook(None, bf16_compress_hook, over="replicas")


WAYS: dict[str, Callable[[], object]] = {
    "the default": step_of(OURS),
    "the default, replicas in bfloat16": step_of(OURS, prepare=narrow_replicas),
    "FULL_SHARD over all": step_of(OURS, sharding_strategy=ShardingStrategy.FULL_SHARD),
}


def row(name: str, report: Report) -> str:
    """Of the table."""
    across = [c for c in report.schedule.collectives if c.across_slices]
    sent = sum(c.wire_bytes * c.times for c in across) / MB
    within = report.wire_bytes / MB - sent
    beside = sum(c.wire_bytes * c.times for c in across if c.asynchronous) / MB
    timing, memory = report.timing, report.memory.required / 2**20
    cells = [f"{within:.1f}", f"{sent:.1f}", f"{sum(c.times for c in across)}"]
    cells += [f"{100 * beside / sent:.0f}", f"{memory:.0f}", f"{1e3 * timing.collective:.1f}"]
    return f"| {name} | " + " | ".join([*cells, f"{1e3 * timing.step:.1f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_slices")
    parser.add_argument("slices", nargs="?", default="2xv5litepod-8")
    where = parser.parse_args().slices
    require_slices(parser, [where])
    print(f"Workload S on {where}:\n")
    print(
        "| | within slices, MB | between, MB | collectives between | of them asynchronous, % "
        "| HBM, MiB | collectives, ms | step, ms |\n|---|" + "---:|" * 7
    )
    for name, step in WAYS.items():
        print(row(name, xla_fsdp.plan(step, where, title=name)), flush=True)


if __name__ == "__main__":
    main()
