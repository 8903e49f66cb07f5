"""Trains networks of the examples on CPU ranks, gathered in one dtype or another."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANKS, SHOWN = 2, 5
Losses = dict[str, float]  # by what they are the loss of
# Gives this rank's inputs and labels of a step; of a negative one, held out.
Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def vit(rank: int, join: Callable[[Iterable[nn.Module]], nn.Module]) -> tuple[nn.Module, Batch]:
    """Two blocks of width 256 on digits of 16 x 16 pixels, 32 of a rank's half a step."""
    from digits import bundled_digits
    from networks import VisionTransformer

    data = {part: bundled_digits(part, 16)[1:] for part in ("train", "val")}

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = data["val" if step < 0 else "train"]
        chosen = torch.arange(rank, 256, RANKS)
        if step >= 0:
            drawn = torch.Generator().manual_seed(step)
            chosen = torch.randperm(len(labels), generator=drawn)[rank : 32 * RANKS : RANKS]
        return images[chosen].expand(-1, 3, -1, -1), labels[chosen]

    return VisionTransformer(16, 4, 256, 4, 2, num_classes=10, join=join), batch


def gpt(rank: int, join: Callable[[Iterable[nn.Module]], nn.Module]) -> tuple[nn.Module, Batch]:
    """Two blocks of width 384 on bytes, six sequences of 64 a rank and step."""
    from gpt import GPT
    from tokens import shipped_texts

    texts = "".join(itertools.islice(shipped_texts(), 40)).encode()[: 1 << 20]
    data = torch.frombuffer(bytearray(texts), dtype=torch.uint8)
    end = len(data) - (len(data) >> 4)  # a sixteenth is held out

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(step % 2**31)
        first, last = (0, end) if step >= 0 else (end, len(data))
        count = 6 if step >= 0 else 48
        starts = torch.randint(first, last - 65, (count * RANKS,), generator=drawn)[rank::RANKS]
        rows = torch.stack([data[start : start + 65] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    return GPT(256, 64, 2, 384, 6, join=join), batch


NETWORKS = {"vit": vit, "gpt": gpt}


def train(rank: int, what: str, dtype: torch.dtype | None, steps: int, seed: int = 0) -> Losses:
    """The mean loss of each fifth of ``steps``, and that of what is held out. ``seed``: of the
    parameters; the data are the same."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    sys.path.insert(0, str(EXAMPLES))
    torch.manual_seed(seed)
    wrap = functools.partial(FSDP, compute_dtype=torch.bfloat16, gather_dtype=dtype)

    def join(blocks: Iterable[nn.Module]) -> nn.Module:
        return nn.Sequential(*(wrap(block) for block in blocks))

    network, batch = NETWORKS[what](rank, join)
    model = wrap(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)

    def loss_of(step: int) -> torch.Tensor:
        inputs, labels = (tensor.to("xla") for tensor in batch(step))
        logits = model(inputs.bfloat16() if inputs.is_floating_point() else inputs)
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    losses = []
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        torch_xla.sync()
        if rank == 0 and step % max(steps // SHOWN, 1) == 0:  # reading it waits for the step
            print(f"step {step}: {loss.item():.4f}", file=sys.stderr, flush=True)
    model.eval()
    with torch.no_grad():
        held_out = loss_of(-1).detach()
    every = torch.stack([*losses, held_out]).cpu()
    every = xm.mesh_reduce("losses", every, lambda ranks: sum(ranks) / RANKS)
    found, each = {}, steps // SHOWN
    for first in range(0, each * SHOWN, each):
        found[f"{first + 1} to {first + each}"] = every[first : first + each].mean().item()
    return {**found, "held out": every[-1].item()}
