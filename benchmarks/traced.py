"""Digests of traced programs: a change that only moves code must not change them.

``python -m benchmarks.traced`` prints a line for each workload and slice. To check a change,
compare with the lines of the commit before it: ``git worktree add ../before HEAD~1``, then
``PYTHONPATH=../before python benchmarks/traced.py`` with this same file. The digests are of the HLO
that the compiler receives, without names of modules, files and lines.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp
from benchmarks.model import Block, adamw_step
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module, scan_blocks
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.tpu.topology import resolve

SLICES = ("v3-8", "v5litepod-8", "v5litepod-64", "v6e-8", "v4-128")
bfloat16 = functools.partial(FSDP, compute_dtype=torch.bfloat16)


def workload_s(checkpoint: bool) -> None:
    """Four blocks of width 1024 between two linear layers, each block a unit, one AdamW step."""
    layer = checkpoint_module if checkpoint else (lambda module: module)
    blocks = [bfloat16(layer(Block(1024, 16, causal=False))) for _ in range(4)]
    model = bfloat16(nn.Sequential(nn.Linear(1024, 1024), *blocks, nn.Linear(1024, 1024)))
    _adamw(model, torch.randn(32, 256, 1024))


def vit_scanned() -> None:
    """Six blocks in one loop after an embedding of patches, with gradient clipping."""
    layers = (Block(512, 8, causal=False) for _ in range(6))
    blocks = scan_blocks(layers, compute_dtype=torch.bfloat16)
    model = bfloat16(nn.Sequential(nn.Linear(768, 512), blocks, nn.Linear(512, 10)))
    _adamw(model, torch.randn(8, 196, 768), clip_norm=1.0)


def mnist() -> None:
    """The network of the MNIST example; each of its four layers is a unit. SGD with momentum."""

    def unit(layer: nn.Module) -> nn.Module:
        return FSDP(checkpoint_module(layer))

    network = nn.Sequential(
        *(unit(nn.Conv2d(1, 10, 5)), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(10)),
        *(unit(nn.Conv2d(10, 20, 5)), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(20)),
        *(nn.Flatten(), unit(nn.Linear(320, 50)), nn.ReLU(), unit(nn.Linear(50, 10))),
    )
    model = FSDP(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    target = torch.zeros(16, dtype=torch.long).to("xla")
    F.cross_entropy(model(torch.randn(16, 1, 28, 28).to("xla")), target).backward()
    optimizer.step()
    optimizer.zero_grad()


def _adamw(model: nn.Module, batch: torch.Tensor, clip_norm: float | None = None) -> None:
    adamw_step(model, lambda: model(batch.to("xla")).float().square().mean(), 1e-3, clip_norm)


WORKLOADS: dict[str, Callable[[], None]] = {
    "S": functools.partial(workload_s, False),
    "S checkpointed": functools.partial(workload_s, True),
    "ViT scanned": vit_scanned,
    "MNIST": mnist,
}


def main() -> None:
    print(f"xla_fsdp of {xla_fsdp.__path__[0]}", file=sys.stderr)
    for name, step in WORKLOADS.items():
        for slice in map(resolve, SLICES):
            torch.manual_seed(0)
            traced = trace_step(step, 1, slice.devices, slice)
            print(f"{name:16} {slice.name:14} {traced.program.fingerprint[:32]}")


if __name__ == "__main__":
    main()
