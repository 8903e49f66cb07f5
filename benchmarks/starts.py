"""The time that the compilation cache saves in a second start: ``python -m benchmarks.starts``.

Starts each program twice, in separate processes, with a new folder for the cache. The programs are
the MNIST example, and 12 transformer blocks of width 256, recomputed in the backward, wrapped
singly or scanned. Each runs on 4 CPU ranks. Prints a table. Losses must be bitwise equal.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch_xla.debug.metrics as met
from torch import nn

import xla_fsdp

from .model import Block

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_mnist.py"
RANKS, BLOCKS, WIDTH, STEPS = 4, 12, 256, 3
PROGRAMS = {
    "mnist": "`examples/train_mnist.py --num_epochs=1`",
    "singly": f"{BLOCKS} transformer blocks of width {WIDTH}, recomputed",
    "scanned": "the same in `scan_blocks`",
}


def start(name: str, folder: Path) -> dict:
    """Run a program in a separate process; return its counts and its total seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.starts", name, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.monotonic() - began}


def child(name: str, folder: Path) -> None:
    """Run the program and print its counts and times as a line of JSON."""
    losses = _example(folder) if name == "mnist" else _blocks(name == "scanned", folder)
    compiled, cached = xla_fsdp.compilation_counts()
    taken = {metric: _seconds(metric) for metric in ("CompileTime", "PersistentCacheLoad")}
    print(json.dumps({"compiled": compiled, "cached": cached, "losses": losses, **taken}))


def _seconds(metric: str) -> float:
    data = met.metric_data(metric)
    return data[1] * 1e-9 if data else 0.0


def _example(folder: Path) -> list:
    sys.argv = [str(EXAMPLE), "--num_epochs=1", f"--compilation_cache={folder / 'programs'}"]
    sys.path.insert(0, str(EXAMPLE.parent))
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        try:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return []


def _blocks(scanned: bool, folder: Path) -> list:
    xla_fsdp.enable_compilation_cache(folder / "programs")
    return xla_fsdp.launch(_train, (scanned,), RANKS)[0]


def _train(rank: int, scanned: bool) -> list[float]:
    torch.manual_seed(0)
    made = (Block(WIDTH, 4) for _ in range(BLOCKS))
    if scanned:
        blocks = xla_fsdp.scan_blocks(made)
    else:
        wrapped = map(xla_fsdp.checkpoint_module, made)
        blocks = nn.Sequential(*map(xla_fsdp.XlaFullyShardedDataParallel, wrapped))
    model = xla_fsdp.XlaFullyShardedDataParallel(nn.Sequential(blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(4, 64, WIDTH).to("xla")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    print("| program | ranks | first start | second start |\n|---|---|---|---|")
    for name, title in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            first, second = start(name, Path(folder)), start(name, Path(folder))
        if first["losses"] != second["losses"] or second["compiled"]:
            sys.exit(f"{name}: the second start compiled or has other losses: {first}, {second}")
        print(
            f"| {title} | {RANKS} "
            f"| {first['compiled']} compiled, {first['CompileTime']:.1f} s; "
            f"{first['seconds']:.0f} s in all "
            f"| {second['cached']} loaded, {second['PersistentCacheLoad']:.2f} s; "
            f"{second['seconds']:.0f} s in all |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        child(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
