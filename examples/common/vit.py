"""A vision transformer in plain torch, whose blocks can be sharded while it is being built."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn


class VisionTransformer(nn.Module):
    """Pre-norm blocks over patches, learned positions, no class token, mean of all tokens.

    Args:
        image_size, patch_size: pixels along an edge; the first a multiple of the second.
        join: makes one module of the blocks, which it takes one by one: each can be sharded before
            the next exists. Default: ``nn.Sequential``.
        pos_dropout, att_dropout, mlp_dropout: probabilities after the positions, on the attention
            weights, and on what both halves of a block return.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        embed_dim: int,
        num_heads: int,
        num_blocks: int,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        pos_dropout: float = 0.0,
        att_dropout: float = 0.0,
        mlp_dropout: float = 0.0,
        join: Callable[[Iterable[nn.Module]], nn.Module] = lambda blocks: nn.Sequential(*blocks),
    ) -> None:
        super().__init__()
        tokens = (image_size // patch_size) ** 2
        self.patch_embed = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, embed_dim))
        self.pos_drop = nn.Dropout(pos_dropout)
        hidden = int(embed_dim * mlp_ratio)
        self.blocks = join(
            Block(embed_dim, num_heads, hidden, att_dropout, mlp_dropout) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)
        for layer in (self.patch_embed, self.head):
            initialize(layer)
        nn.init.normal_(self.pos_embed, std=0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images``: (batch, 3, image_size, image_size); returns (batch, num_classes) logits."""
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2)  # (batch, tokens, embed_dim)
        tokens = self.blocks(self.pos_drop(tokens + self.pos_embed))
        return self.head(self.norm(tokens).mean(dim=1))


class Block(nn.Module):
    """Attention, then a perceptron with one hidden layer, each behind a norm in a residual."""

    def __init__(
        self, width: int, heads: int, hidden: int, att_dropout: float, mlp_dropout: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, att_dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(mlp_dropout)
        for layer in (self.attention.qkv, self.attention.out, self.up, self.down):
            initialize(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm2(x))))))


class Attention(nn.Module):
    """Every token attends to every token."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head width)
        weights = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(dim=-1)
        return self.out((self.drop(weights) @ v).transpose(1, 2).reshape(batch, tokens, width))


def initialize(layer: nn.Linear | nn.Conv2d) -> None:
    """Normal weights of standard deviation 0.02, no bias."""
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)


def count_parameters(
    image_size: int,
    patch_size: int,
    embed_dim: int,
    num_blocks: int,
    mlp_ratio: float = 4.0,
    num_classes: int = 1000,
    **others: object,
) -> int:
    """How many parameters a :class:`VisionTransformer` has, without building it."""
    with torch.device("meta"):
        model = VisionTransformer(
            image_size, patch_size, embed_dim, 1, num_blocks, mlp_ratio, num_classes
        )
    return sum(parameter.numel() for parameter in model.parameters())
