"""The model for the tests: a small language model of equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SEED = 11


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its batch; ``batch`` is the number of sequences for each rank."""

    blocks: int
    width: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width + 3), nn.Linear(4 * width + 3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        heads = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (b, h, s, d)
        mixed = (q @ k.transpose(-2, -1) * (w // self.heads) ** -0.5).softmax(-1) @ v
        x = x + self.mix(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Returns the mean cross entropy of tokens ``(b, s)``, each given all; one weight is frozen.

    ``wrap`` is called on every block, ``join`` on the list of all blocks.
    """

    def __init__(
        self,
        size: Size,
        wrap: Callable[[nn.Module], nn.Module] = lambda block: block,
        join: Callable[[list[nn.Module]], nn.Module] = lambda blocks: nn.Sequential(*blocks),
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Parameter(0.02 * torch.randn(size.sequence, size.width))
        self.gain = nn.Parameter(torch.full((size.width,), 1.5), requires_grad=False)
        blocks = [Block(size) for _ in range(size.blocks)]
        self.blocks = join([wrap(block) for block in blocks])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.embed(tokens) * self.gain + self.place))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def tokens(size: Size, ranks: int, number: int) -> torch.Tensor:
    """The global batch of step ``number``, ``(ranks * batch, sequence)``, on the CPU."""
    generator = torch.Generator().manual_seed(1000 + number)
    shape = ranks * size.batch, size.sequence
    return torch.randint(size.vocabulary, shape, generator=generator)
