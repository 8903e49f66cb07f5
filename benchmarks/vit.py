"""The 10-billion-parameter vision transformer, planned: ``python -m benchmarks.vit``.

Width 5120, 32 blocks, 32 heads, MLP ratio 4, patch 14 of 224 x 224 pixels, no class token, mean of
all tokens; batch 8 a device, AdamW, clipping at 1, bfloat16, every block checkpointed and wrapped.
Prints the report, and the memory that planning took on this machine: this process and the
compiler's together.
"""

from __future__ import annotations

import argparse
import contextlib

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp

from .memory import Peak
from .model import Block
from .slices import require_slices

WIDTH, HEADS, PATCH, IMAGE = 5120, 32, 14, 224


class VisionTransformer(nn.Module):
    """Blocks are wrapped as they are built, so that the model never exists in full."""

    def __init__(self, blocks: int, classes: int = 1000, scan: bool = True):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(torch.zeros(1, (IMAGE // PATCH) ** 2, WIDTH))
        plain = (Block(WIDTH, HEADS, causal=False) for _ in range(blocks))
        if scan:
            self.blocks = xla_fsdp.scan_blocks(plain, compute_dtype=torch.bfloat16)
        else:
            self.blocks = nn.Sequential(*[_wrap(xla_fsdp.checkpoint_module(b)) for b in plain])
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def _wrap(module: nn.Module) -> nn.Module:
    return xla_fsdp.XlaFullyShardedDataParallel(module, compute_dtype=torch.bfloat16)


def step_of(blocks: int, batch: int, scan: bool = True):
    """A function that builds the model and trains a step."""

    def step() -> torch.Tensor:
        model = _wrap(VisionTransformer(blocks, scan=scan))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        images = torch.randn(batch, 3, IMAGE, IMAGE).to("xla")
        labels = torch.randint(1000, (batch,)).to("xla")
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def resident() -> int:
    """Resident memory of this process and its children, in bytes."""
    this, total = psutil.Process(), 0
    for process in (this, *this.children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("--slice", default="v3-128", help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="images a device, default 8")
    scan = "blocks in one loop (scan_blocks); --no-scan: each wrapped and checkpointed by itself"
    parser.add_argument("--scan", action=argparse.BooleanOptionalAction, default=True, help=scan)
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--picture", help="also draw it there: .png or .html")
    flags = parser.parse_args()
    require_slices(parser, [flags.slice])
    with Peak(resident, 0.05) as memory:
        report = xla_fsdp.plan(
            step_of(flags.blocks, flags.batch, flags.scan),
            flags.slice,
            cache=flags.cache,
            title=f"ViT, {flags.blocks} blocks of width {WIDTH}, batch {flags.batch} a device",
        )
    print(report)
    print(f"\nhost memory for planning: {memory.value / 1e9:.2f} GB resident, all processes")
    if flags.picture:
        report.plot(flags.picture)


if __name__ == "__main__":
    main()
