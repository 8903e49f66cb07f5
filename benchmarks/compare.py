"""Compare with the FSDP class of torch_xla, on CPU ranks: ``python -m benchmarks.compare``.

Both classes train the same model in turns. Host time is measured without a launch, as on a TPU.
Only the ratios are meaningful: the ranks share the cores of the machine with each other and with
everything else that runs. ``benchmarks.planned`` compares memory and bytes sent, on TPU slices.

A lane is a model and its optimizer, sharded by our class or by the in-tree one. Each measurement
runs in a separate process, because the runtime and the environment are those of a process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .model import Block
from .tables import head, line
from .workload_s import IN_TREE, OURS, classes_of

SEED = 7
VOCABULARY = 256
MOST_WARM_UP_STEPS = 8  # nothing compiles after two or three


@dataclass(frozen=True)
class Workload:
    """The workload of every lane; its fields are flags."""

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
    if name == IN_TREE:
        options["pin_layout_in_collective_ops"] = False
    fsdp, checkpoint_module = classes_of(name)
    return partial(fsdp, **options), checkpoint_module


def step_times(work: Workload, steps: int, rounds: int) -> dict[str, dict]:
    """Milliseconds of a step and losses, by lane. Both are in one launch, and take turns."""
    import xla_fsdp

    each = max(1, round(steps / rounds))
    # The in-tree checkpoint has its state in a global variable, so only one rank, which is a
    # thread, may trace at a time; for a fair comparison also with our class.
    turns = threading.Lock() if work.checkpoint else contextlib.nullcontext()
    arguments = (work, rounds, each, turns)
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


# label, figure, decimals; below 1 is better in both rows
ROWS = (
    ("step time, ms", "step_ms", 0),
    ("host tracing a step as on a TPU, CPU ms", "trace_ms", 1),
)


def markdown(ours: dict, in_tree: dict) -> str:
    """Ours, in-tree and their ratio."""
    lines = [head(["", "ours", "in-tree", "ratio"])]
    for label, name, decimals in ROWS:
        a, b = ours[name], in_tree[name]
        lines.append(line([label, f"{a:.{decimals}f}", f"{b:.{decimals}f}", f"{a / b:.2f}"]))
    return "\n".join(lines)


def _measured(name: str) -> dict[str, dict]:
    """The figures of a measurement by lane, from a separate process with the same flags."""
    print(f"measuring {name}", file=sys.stderr)
    command = [sys.executable, "-m", "benchmarks.compare", *sys.argv[1:], f"--measure={name}"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed ({run.returncode}):\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    default = Workload()
    for name in ("ranks", "blocks", "width", "heads", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument(
        "--steps", type=int, default=20, help="timed steps of each class, over all rounds"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often the classes take turns")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--compute_dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--measure", choices=["step", "tracing"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    flags = parse()
    work = Workload(**{name: getattr(flags, name) for name in Workload.__dataclass_fields__})
    if flags.measure:
        found = (
            step_times(work, flags.steps, flags.rounds)
            if flags.measure == "step"
            else tracing_times(work, flags.steps)
        )
        print(json.dumps(found), flush=True)
        os._exit(0)  # what was traced must not run, and freeing it takes time
    traced, stepped = _measured("tracing"), _measured("step")
    ours, in_tree = ({**traced[name], **stepped[name]} for name in (OURS, IN_TREE))
    pairs = zip(ours["losses"], in_tree["losses"], strict=True)
    largest = max(abs(a - b) / abs(b) for a, b in pairs)
    print(f"{markdown(ours, in_tree)}\n\nlargest relative difference of losses: {largest:.1e}")


if __name__ == "__main__":
    main()
