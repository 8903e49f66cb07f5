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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .model import Block
from .tables import head, line
from .workload_s import IN_TREE, OURS, classes_of

SEED = 7
VOCABULARY = 256
WARM_UP_STEPS = 4  # nothing compiles after two or three
UNTIMED_STEPS = 2  # they create optimizer state and have one-time costs


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

    ``turns``: taken while a step is traced. ``simulated``: simulates rank ``rank`` of
    ``work.ranks``; no other rank exists.
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
        self.losses: list[float] = []
        self.seconds: list[float] = []
        torch.manual_seed(SEED)  # the same weights on every rank and in every lane
        model = LanguageModel(work.blocks, work.width, work.heads, work.sequence)
        options: dict = {} if name == OURS else {"pin_layout_in_collective_ops": False}
        if work.compute_dtype:
            options["compute_dtype"] = getattr(torch, work.compute_dtype)
        if simulated:
            options["sharding_groups"] = [list(range(work.ranks))]
            options |= {"sharding_rank": rank, "sharding_world_size": work.ranks}
        wrap, checkpoint = classes_of(name)
        for number, block in enumerate(model.blocks):
            block = checkpoint(block) if work.checkpoint else block
            model.blocks[number] = wrap(block, **options)
        self.model = wrap(model, **options).to(torch_xla.device())
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

    def run(self, steps: int) -> None:
        """Runs steps on all ranks, and stores the seconds of one."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        xm.rendezvous("begin")
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.trace()  # kept over the sync: with one output less it is another program
            torch_xla.sync()
        xm.wait_device_ops()
        xm.rendezvous("done")
        self.seconds.append((time.perf_counter() - start) / steps)
        self.losses.append(loss.item())


def step_times(work: Workload, steps: int, rounds: int) -> dict[str, dict]:
    """Milliseconds of a step and losses, by lane. Both are in one launch, and take turns."""
    import xla_fsdp

    # The in-tree checkpoint has its state in a global variable, so only one rank, which is a
    # thread, may trace at a time; for a fair comparison also with our class.
    turns = threading.Lock() if work.checkpoint else contextlib.nullcontext()
    arguments = (work, rounds, max(1, round(steps / rounds)), turns)
    by_rank = xla_fsdp.launch(_step_times_of_rank, arguments, num_devices=work.ranks)
    return {
        name: {
            "step_ms": 1e3 * statistics.median(by_rank[0][name][0]),
            "losses": [
                statistics.mean(step)
                for step in zip(*(rank[name][1] for rank in by_rank), strict=True)
            ],
        }
        for name in (OURS, IN_TREE)
    }


def _step_times_of_rank(rank: int, work: Workload, rounds: int, steps: int, turns) -> dict:
    import xla_fsdp

    lanes = [Lane(name, work, rank, turns) for name in (OURS, IN_TREE)]
    for lane in lanes:
        for _ in range(WARM_UP_STEPS):
            lane.run(1)
        lane.seconds.clear()
    compiled = xla_fsdp.compilation_counts()
    for number in range(rounds):
        # Alternate the order: caches and clock rate of the first lane affect the second.
        for lane in lanes if number % 2 == 0 else reversed(lanes):
            lane.run(steps)
    if xla_fsdp.compilation_counts() != compiled:
        raise RuntimeError("a step was compiled while it was timed")
    return {lane.name: (lane.seconds, lane.losses) for lane in lanes}


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
    for number in range(UNTIMED_STEPS + steps):
        for lane in lanes if number % 2 == 0 else reversed(lanes):
            start = time.process_time()
            lane.trace()
            lane.seconds.append(time.process_time() - start)
    samples = {lane.name: lane.seconds[UNTIMED_STEPS:] for lane in lanes}
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
