"""Pre-norm transformer blocks of the benchmarks, and a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and with a residual."""

    def __init__(self, width: int, heads: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        # Shapes: b batch, s sequence, w width, h heads, d = w / h.
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x):
        b, s, w = x.shape
        d = w // self.heads
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, d).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * d**-0.5  # (b, h, s, s)
        mixed = self.mask(scores).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, s, w))

    def mask(self, scores):
        if not self.causal:
            return scores
        future = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
        return scores.masked_fill(future, -1e9)


class BlockOfParts(Block):
    """The same block, written for TPUs.

    Queries, keys and values are computed by separate matmuls with parts of the weight, directly in
    heads. The matmul after attention takes heads and joins them.
    """

    def attention(self, x):
        from xla_fsdp.layers import einsum, softmax

        w = x.shape[-1]
        d = w // self.heads
        weights, biases = self.qkv.weight.split(w), self.qkv.bias.split(w)
        q, k, v = (
            einsum("bsw,hdw->bhsd", x, weight.view(self.heads, d, w)) + bias.view(-1, 1, d)
            for weight, bias in zip(weights, biases, strict=True)
        )
        scores = einsum("bhqd,bhkd->bhqk", q, k) * d**-0.5
        mixed = einsum("bhqk,bhkd->bhqd", softmax(self.mask(scores)), v)
        out = einsum("bhsd,whd->bsw", mixed, self.out.weight.view(w, self.heads, d))
        return out + self.out.bias


def adamw_step(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    lr: float = 1e-3,
    clip_norm: float | None = None,
) -> torch.Tensor:
    """Trains a step with AdamW on the loss ``loss_of()``, and returns the loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    loss = loss_of()
    loss.backward()
    if clip_norm is not None:
        model.clip_grad_norm_(clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


class LowRankLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two narrow matrices (LoRA)."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.narrow = nn.Linear(linear.in_features, rank, bias=False)
        self.widen = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.widen.weight)

    def forward(self, x):
        return self.linear(x) + self.widen(self.narrow(x))


class LowRankBlock(Block):
    """A frozen block with adapters of rank 16 beside its four linear layers."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.requires_grad_(False)
        for layer in ("qkv", "out", "up", "down"):
            setattr(self, layer, LowRankLinear(getattr(self, layer), 16))
