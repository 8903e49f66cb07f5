"""The time until the first steps of a job on CPU ranks: ``python -m benchmarks.first_steps``.

The model is GPT-2 with three layers (width 768, 12 heads, a vocabulary of 50,257, 64 tokens per
rank), each block wrapped, with AdamW, on 4 CPU ranks; the loss is read after every step. Each
setting of ``XLA_FLAGS`` runs in separate processes, in turns with the others, without a cache.
Prints the least of all rounds: seconds since ``launch`` was called, and CPU seconds, which depend
less on other work of the machine. The time of a step is the median of the second half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

RANKS, LAYERS, WIDTH, HEADS = 4, 3, 768, 12
VOCABULARY, SEQUENCE, BATCH = 50257, 64, 1

_LEVEL, _PASSES = "--xla_backend_optimization_level=", "--xla_llvm_disable_expensive_passes=true"
_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
SETTINGS = {
    "as XLA comes": "",
    "level 1": f"{_LEVEL}1",
    "level 0": f"{_LEVEL}0",
    "passes": _PASSES,
    "level 0, passes": f"{_LEVEL}0 {_PASSES}",
    "level 1, passes": f"{_LEVEL}1 {_PASSES}",
    "emitters": _EMITTERS,
    "level 0, emitters": f"{_LEVEL}0 {_EMITTERS}",
    "level 0, passes, emitters": f"{_LEVEL}0 {_PASSES} {_EMITTERS}",
}


def child(steps: int) -> None:
    """Train, and print the marks of rank 0 and the losses as JSON."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as met

    import xla_fsdp

    torch.set_num_threads(1)
    began = time.monotonic(), time.process_time()

    def mark() -> list[float]:
        """Elapsed seconds, CPU seconds, number of compiled programs, and seconds of compilation."""
        compiling = met.metric_data("CompileTime")
        return [
            time.monotonic() - began[0],
            time.process_time() - began[1],
            xla_fsdp.compilation_counts().compiled,
            compiling[1] * 1e-9 if compiling else 0.0,
        ]

    def train(rank: int) -> tuple[list[list[float]], list[float]]:
        model, tokens = _model(), torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1)).to("xla")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        marks, losses = [mark()], []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses.append(loss.item())
            marks.append(mark())
        return marks, losses

    print(json.dumps(xla_fsdp.launch(train, num_devices=RANKS)[0]))


def _model():
    import torch
    import torch.nn.functional as F
    from torch import nn

    import xla_fsdp

    from .model import Block

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(VOCABULARY, WIDTH)
            self.place = nn.Embedding(SEQUENCE, WIDTH)
            blocks = (Block(WIDTH, HEADS) for _ in range(LAYERS))
            self.blocks = nn.Sequential(*map(xla_fsdp.XlaFullyShardedDataParallel, blocks))
            self.norm = nn.LayerNorm(WIDTH)
            nn.init.normal_(self.token.weight, std=0.02)

        def forward(self, tokens):  # (b, s + 1)
            x = self.token(tokens[:, :-1]) + self.place.weight
            logits = F.linear(self.norm(self.blocks(x)), self.token.weight)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    return xla_fsdp.XlaFullyShardedDataParallel(GPT2())


def run(flags: str, steps: int) -> dict:
    """Start once with ``flags``; return times and losses."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.first_steps", "--child", f"--steps={steps}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    marks, losses = json.loads(done.stdout.splitlines()[-1])
    clock, processor, programs, compiling = zip(*marks, strict=True)
    later = range(steps // 2, steps)
    return {
        **{f"step {step}": clock[step] for step in (1, 2, 10)},
        "compiling": compiling[-1],
        "programs": programs[-1],
        "a step": statistics.median(clock[i + 1] - clock[i] for i in later),
        "CPU of step 1": processor[1] - processor[0],
        "CPU to step 10": processor[10],
        "CPU a step": statistics.median(processor[i + 1] - processor[i] for i in later),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 10:
        parser.error(f"--steps={options.steps}: must be at least 10, since the table has step 10")
    if options.child:
        child(options.steps)
        return
    found = {name: [] for name in options.settings}
    for _ in range(options.rounds):
        for name, results in found.items():
            results.append(run(SETTINGS[name], options.steps))
            print(name, json.dumps(results[-1]), file=sys.stderr, flush=True)
    _print_table(found)


def _print_table(found: dict[str, list[dict]]) -> None:
    columns = [name for name in next(iter(found.values()))[0] if name != "losses"]
    print(f"| setting | {' | '.join(columns)} | step 1000, CPU | losses |")
    print("|---" * (len(columns) + 3) + "|")
    reference = next(iter(found.values()))[0]["losses"]
    for name, results in found.items():
        best = {column: min(result[column] for result in results) for column in columns}
        far = best["CPU to step 10"] + 990 * best["CPU a step"]
        apart = max(abs(a / b - 1) for a, b in zip(results[0]["losses"], reference, strict=True))
        row = [f"{value:.4g}" for value in best.values()]
        print(f"| {name} | {' | '.join(row)} | {far:.0f} | {apart:.1e} |")


if __name__ == "__main__":
    main()
