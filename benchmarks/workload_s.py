"""Workload S: four pre-norm transformer blocks of width 1024 between two linear layers.

16 heads, MLP ratio 4, no mask. Each block is an FSDP unit, and the rest of the network is another.
A batch of 32 sequences of 256 per device, bfloat16 compute, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import xla_fsdp

from .model import Block, BlockOfParts, LowRankBlock, adamw_step

OURS, IN_TREE = "ours", "in-tree"


class Network(nn.Module):
    def __init__(
        self,
        wrap: Callable[[nn.Module], nn.Module],
        blocks: int = 4,
        width: int = 1024,
        kind: type[Block] = Block,
    ):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.Sequential(*[wrap(kind(width, 16, causal=False)) for _ in range(blocks)])
        self.last = nn.Linear(width, width)
        for end in (self.first, self.last):
            end.requires_grad_(kind is not LowRankBlock)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def train(model: nn.Module, batch: int = 32) -> torch.Tensor:
    """Trains a step of the wrapped :class:`Network`; the loss is the mean of squared outputs."""

    def loss() -> torch.Tensor:
        return model(torch.randn(batch, 256, 1024).to("xla")).float().square().mean()

    return adamw_step(model, loss)


def step_of(
    name: str,
    checkpoint: bool = False,
    blocks: int = 4,
    prepare: Callable[[Any], object] | None = None,
    kind: type[Block] = Block,
    **options: Any,
) -> Callable[[], torch.Tensor]:
    """A function that builds workload S, wrapped by class ``name``, and trains a step.

    ``prepare``: called with the wrapped model. ``options``: other options of the class.
    """

    def step() -> torch.Tensor:
        fsdp, checkpoint_module = classes_of(name)

        def wrap(module: nn.Module) -> nn.Module:
            return fsdp(module, compute_dtype=torch.bfloat16, **options)

        def wrap_block(block: nn.Module) -> nn.Module:
            if not checkpoint:
                return wrap(block)
            # Each class in the order that its documentation recommends.
            if name == OURS:
                return wrap(checkpoint_module(block))
            return checkpoint_module(wrap(block))

        model = wrap(Network(wrap_block, blocks, kind=kind))
        if prepare is not None:
            prepare(model)
        return train(model)

    return step


def scanned_step(blocks: int = 4, kind: type[Block] = BlockOfParts) -> Callable[[], torch.Tensor]:
    """As :func:`step_of` for the class of this package, with the blocks in ``scan_blocks``."""

    def step() -> torch.Tensor:
        model = Network(lambda block: block, 0)
        model.blocks = xla_fsdp.scan_blocks(
            (kind(1024, 16, causal=False) for _ in range(blocks)),
            compute_dtype=torch.bfloat16,
        )
        return train(xla_fsdp.XlaFullyShardedDataParallel(model, compute_dtype=torch.bfloat16))

    return step


def classes_of(name: str):
    """The wrapper class, and the function that checkpoints a module."""
    if name == OURS:
        from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module
    elif name == IN_TREE:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module
    else:
        raise ValueError(f"no class has the name {name!r}; allowed are {OURS!r} and {IN_TREE!r}")
    return XlaFullyShardedDataParallel, checkpoint_module
