"""The measurements of ``benchmarks.compare``: ``python -m benchmarks.lanes NAME WORKLOAD ...``.

A lane is a model and its optimizer, sharded by our class or by the in-tree one. Each measurement
runs in a separate process, because memory, programs and the environment are those of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from .model import Block

OURS, IN_TREE = "ours", "in-tree"
SEED = 7
VOCABULARY = 256
MOST_WARM_UP_STEPS = 8  # nothing compiles after two or three


@dataclass(frozen=True)
class Workload:
    """The workload of every lane; its fields are the flags of ``benchmarks.compare``."""

    ranks: int = 4
    blocks: int = 12
    width: int = 256
    heads: int = 4
    batch: int = 4
    sequence: int = 64
    checkpoint: bool = False
    compute_dtype: str | None = None


class LanguageModel(nn.Module):
    """Returns the mean cross-entropy of the next byte."""

    def __init__(self, blocks: int, width: int, heads: int, sequence: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(sequence, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):  # (b, s + 1)
        x = self.embed(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Lane:
    """The model and optimizer of one rank, sharded by one of the classes.

    Args:
        turns: taken while a step is traced.
        simulated: simulates rank ``rank`` of ``work.ranks``; no other rank exists.
    """

    def __init__(
        self,
        name: str,
        work: Workload,
        rank: int,
        turns: contextlib.AbstractContextManager,
        simulated: bool = False,
    ):
        import torch_xla

        self.name, self.turns = name, turns
        torch.manual_seed(SEED)  # the same weights on every rank and in every lane
        model = LanguageModel(work.blocks, work.width, work.heads, work.sequence)
        wrap, checkpoint = _classes(name, work, rank if simulated else None)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = wrap(checkpoint(block) if work.checkpoint else block)
        self.model = wrap(model).to(torch_xla.device())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        # Each rank has another part of the batch.
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        shape = work.batch, work.sequence + 1
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        self.tokens = tokens.to(torch_xla.device())
        torch_xla.sync()

    def trace(self) -> torch.Tensor:
        """Traces forward, backward and optimizer; nothing runs before ``torch_xla.sync()``."""
        with self.turns:
            loss = self.model(self.tokens)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    def run(self, wait: bool = False) -> torch.Tensor:
        """Runs a step; returns its loss."""
        import torch_xla

        loss = self.trace()  # kept over the sync: with one output less it is another program
        torch_xla.sync(wait=wait)
        return loss


def _classes(name: str, work: Workload, simulated_rank: int | None) -> tuple[Callable, Callable]:
    """The wrapper and the function that checkpoints a block."""
    options: dict = {}
    if work.compute_dtype:
        options["compute_dtype"] = getattr(torch, work.compute_dtype)
    if simulated_rank is not None:
        options["sharding_groups"] = [list(range(work.ranks))]
        options |= {"sharding_rank": simulated_rank, "sharding_world_size": work.ranks}
    if name == OURS:
        import xla_fsdp as library
    else:
        import torch_xla.distributed.fsdp as library

        options["pin_layout_in_collective_ops"] = False

    def wrap(module: nn.Module) -> nn.Module:
        return library.XlaFullyShardedDataParallel(module, **options)

    return wrap, library.checkpoint_module


def _turns(work: Workload) -> contextlib.AbstractContextManager:
    # The in-tree checkpoint has its state in a global variable, so only one rank, which is a
    # thread, may trace at a time; for a fair comparison also with our class.
    return threading.Lock() if work.checkpoint else contextlib.nullcontext()


def step_times(work: Workload, steps: int, rounds: int) -> dict[str, dict]:
    """Milliseconds of a step and losses, by lane. Both are in one launch, and take turns."""
    import xla_fsdp

    each = max(1, round(steps / rounds))
    arguments = (work, rounds, each, _turns(work))
    by_rank = xla_fsdp.launch(_step_times_of_rank, arguments, num_devices=work.ranks)
    return {
        name: {
            "step_ms": 1e3 * statistics.median(by_rank[0][name]["seconds"]),
            "step_ms_rounds": [1e3 * value for value in by_rank[0][name]["seconds"]],
            "losses": [
                statistics.mean(step)
                for step in zip(*(rank[name]["losses"] for rank in by_rank), strict=True)
            ],
        }
        for name in (OURS, IN_TREE)
    }


def _step_times_of_rank(rank: int, work: Workload, rounds: int, steps: int, turns) -> dict:
    lanes = [Lane(name, work, rank, turns) for name in (OURS, IN_TREE)]
    found = {lane.name: {"losses": _warm_up(lane), "seconds": []} for lane in lanes}
    compiled = _compiled()
    for number in range(rounds):
        # Alternate the order: caches and clock rate of the first lane affect the second.
        for lane in lanes if number % 2 == 0 else reversed(lanes):
            _wait_for_all()
            start = time.perf_counter()
            for _ in range(steps):
                loss = lane.run()
            _wait_for_all()
            del loss
            found[lane.name]["seconds"].append((time.perf_counter() - start) / steps)
    if _compiled() != compiled:
        raise RuntimeError("a step was compiled while it was timed")
    for lane in lanes:
        found[lane.name]["losses"].append(lane.trace().item())
    return found


def _warm_up(lane: Lane) -> list[float]:
    """Runs steps until nothing compiles; returns their losses."""
    import torch_xla.core.xla_model as xm

    losses, before, count = [], None, _compiled()
    while before != count and len(losses) < MOST_WARM_UP_STEPS:
        before = count
        losses.append(lane.run().item())
        xm.rendezvous("warm")  # all ranks read the same count
        count = _compiled()
        xm.rendezvous("read")
    return losses


def _compiled() -> int:
    import torch_xla.debug.metrics as met

    data = met.metric_data("CompileTime")
    return data[0] if data else 0


def _wait_for_all() -> None:
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()
    xm.rendezvous("done")


def tracing_times(work: Workload, steps: int) -> dict[str, dict]:
    """Host milliseconds of a step as on a TPU, by lane: no launch, nothing compiled or run.

    Simulates rank 0: one device, the real sharding groups, and the collectives of torch_xla, as in
    a process on a pod. The lanes take turns, one step each. In a launch on CPU, every torch call
    also goes through the launch's function mode, and the collectives of ``xm`` through
    replacements, which do not exist on a TPU.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    # Otherwise torch_xla omits collectives, since there is only one device.
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
    turns = contextlib.nullcontext()
    lanes = [Lane(name, work, 0, turns, simulated=True) for name in (OURS, IN_TREE)]
    samples: dict[str, list[float]] = {lane.name: [] for lane in lanes}
    first = 2  # steps that create optimizer state and have one-time costs
    for number in range(first + steps):
        for lane in lanes if number % 2 == 0 else reversed(lanes):
            start = time.process_time()
            lane.trace()
            if number >= first:
                samples[lane.name].append(time.process_time() - start)
    return {name: {"trace_ms": 1e3 * statistics.median(one)} for name, one in samples.items()}


def memory(work: Workload, name: str) -> dict[str, int]:
    """The resident bytes of the process between steps, and their peak in a step.

    Buffers of XLA on CPU are ordinary host memory, so the peak includes every gathered parameter.
    """
    import xla_fsdp

    arguments = (work, name, _turns(work))
    return xla_fsdp.launch(_memory_of_rank, arguments, num_devices=work.ranks)[0]


def memory_environment(dump: Path) -> dict[str, str]:
    """The environment for :func:`memory`: XLA dumps its programs, and freed memory is returned."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
    limits = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    return {**os.environ, "XLA_FLAGS": flags.strip(), **limits}


def _memory_of_rank(rank: int, work: Workload, name: str, turns) -> dict[str, int]:
    import torch_xla.core.xla_model as xm

    lane = Lane(name, work, rank, turns)

    def run(steps: int) -> None:
        for _ in range(steps):
            lane.run(wait=True)
            xm.rendezvous("step")

    run(3)
    if rank == 0:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    xm.rendezvous("reset")
    before = _status("VmRSS")
    run(4)
    return {"idle_rss_bytes": before, "peak_rss_bytes": _status("VmHWM")}


def _status(field: str) -> int:
    """A number of bytes in /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


MEASUREMENTS = {one.__name__: one for one in (step_times, tracing_times, memory)}


def main() -> None:
    name, work, *arguments = map(json.loads, sys.argv[1:])
    print(json.dumps(MEASUREMENTS[name](Workload(**work), *arguments)), flush=True)
    os._exit(0)  # what was traced must not run, and freeing it takes time


if __name__ == "__main__":
    main()
