"""The workload: a causal language model over bytes, pre-norm transformer blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and around a residual."""

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
        b, s, w = x.shape
        q, k, v = self.project(self.norm1(x))  # each (b, h, s, d)
        scores = q @ k.transpose(-2, -1) * (w // self.heads) ** -0.5  # (b, h, s, s)
        if self.causal:
            future = torch.ones(s, s, device=x.device).triu(1).bool()
            scores = scores.masked_fill(future, -1e9)
        mixed = scores.softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def project(self, x):
        b, s, w = x.shape
        return (
            self.qkv(x).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )


class BlockOfParts(Block):
    """The same, by three products with parts of the weight instead of three parts of a product,
    whose gradients would be copied into one tensor."""

    def project(self, x):
        from xla_fsdp.layers import contracted

        b, s, w = x.shape
        parts = zip(self.qkv.weight.split(w), self.qkv.bias.split(w), strict=True)
        apart = (contracted(x, *part).view(b, s, self.heads, -1) for part in parts)
        return [part.transpose(1, 2) for part in apart]


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
