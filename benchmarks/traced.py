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
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module, scan_blocks
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.tpu.topology import resolve

SLICES = ("v3-8", "v5litepod-8", "v5litepod-64", "v6e-8", "v4-128")
bfloat16 = functools.partial(FSDP, compute_dtype=torch.bfloat16)


class Block(nn.Module):
    """A pre-norm transformer block of ViT's form."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        parts = self.qkv(self.norm1(x)).reshape(b, s, 3, self.heads, w // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Digits(nn.Module):
    """The network of the MNIST example; each of its four layers is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = FSDP(checkpoint_module(nn.Conv2d(1, 10, 5)))
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = FSDP(checkpoint_module(nn.Conv2d(10, 20, 5)))
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = FSDP(checkpoint_module(nn.Linear(320, 50)))
        self.fc2 = FSDP(checkpoint_module(nn.Linear(50, 10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def workload_s(checkpoint: bool) -> None:
    """Four blocks of width 1024 between two linear layers, each block a unit, one AdamW step."""
    layer = checkpoint_module if checkpoint else (lambda module: module)
    blocks = [bfloat16(layer(Block(1024, 16))) for _ in range(4)]
    model = bfloat16(nn.Sequential(nn.Linear(1024, 1024), *blocks, nn.Linear(1024, 1024)))
    _adamw(model, torch.randn(32, 256, 1024))


def vit_scanned() -> None:
    """Six blocks in one loop after a patch embedding, with gradient clipping."""
    blocks = scan_blocks((Block(512, 8) for _ in range(6)), compute_dtype=torch.bfloat16)
    embed = nn.Conv2d(3, 512, 16, 16)
    model = bfloat16(nn.Sequential(embed, nn.Flatten(2), Transposed(), blocks, nn.Linear(512, 10)))
    _adamw(model, torch.randn(8, 3, 224, 224), clip=1.0)


class Transposed(nn.Module):
    """``(batch, width, patches)`` to ``(batch, patches, width)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def mnist() -> None:
    """Convolutions, batch norms, momentum."""
    model = FSDP(Digits())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    target = torch.zeros(16, dtype=torch.long).to("xla")
    loss = F.nll_loss(model(torch.randn(16, 1, 28, 28).to("xla")), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _adamw(model: nn.Module, batch: torch.Tensor, clip: float | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(batch.to("xla")).float().square().mean()
    loss.backward()
    if clip is not None:
        model.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad()


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
