"""Decoders of the GPT-3 family in plain torch, with the sizes of fairseq."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Size(NamedTuple):
    layers: int
    width: int
    heads: int


# Brown et al., arXiv 2005.14165, table 2.1; heads as in fairseq's transformer_lm_gpt3_*, which
# differ for 1.3B.
FAMILY = {
    "tiny": Size(2, 128, 4),
    "125M": Size(12, 768, 12),
    "350M": Size(24, 1024, 16),
    "760M": Size(24, 1536, 16),
    "1.3B": Size(24, 2048, 32),
    "2.7B": Size(32, 2560, 32),
    "6.7B": Size(32, 4096, 32),
    "13B": Size(40, 5120, 40),
    "175B": Size(96, 12288, 96),
}
# fairseq's: words of its dictionary, filled up to a multiple of 32, and positions for 2048 tokens
# (here those from 0 on are used, there those from 2 on).
VOCABULARY, POSITIONS = 50_272, 2_050


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """The cross entropy of a last linear layer, in float32; labels of -100 do not count."""
    logits = F.linear(hidden, weight).float().flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), reduction=reduction)


class GPT(nn.Module):
    """Pre-norm blocks with learned positions, without dropout; embedding and head are not tied.

    Args:
        vocabulary: number of different tokens.
        positions: length of the longest sequence.
        join: joins the blocks into one module. It gets an iterator, so each block can be sharded
            before the next one is created. Default: ``nn.Sequential``.
        attention: computes attention, called like ``F.scaled_dot_product_attention``.
        cross_entropy: computes the loss, called like :func:`linear_cross_entropy`.
    """

    def __init__(
        self,
        vocabulary: int,
        positions: int,
        layers: int,
        width: int,
        heads: int,
        join: Callable[[Iterable[nn.Module]], nn.Module] = lambda blocks: nn.Sequential(*blocks),
        attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention,
        cross_entropy: Callable[..., torch.Tensor] = linear_cross_entropy,
    ) -> None:
        super().__init__()
        self.cross_entropy = cross_entropy
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(positions, width))
        # The sum of all blocks grows with their number, so initial outputs are smaller (GPT-2).
        narrow = 0.02 * (2 * layers) ** -0.5
        self.blocks = join(Block(width, heads, attention, narrow) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for weight in (self.embed.weight, self.positions, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, reduction: str = "mean"
    ) -> torch.Tensor:
        """``tokens``: (batch, length). Returns logits (batch, length, vocabulary) of the tokens
        that follow or, if these are given as ``labels``, the cross entropy."""
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        x = self.norm(self.blocks(x))
        if labels is None:
            return self.head(x)
        return self.cross_entropy(x, self.head.weight, labels, reduction=reduction)


class Block(nn.Module):
    """Attention and a perceptron with one hidden layer, each after a norm and with a residual."""

    def __init__(
        self, width: int, heads: int, attention: Callable[..., torch.Tensor], narrow: float
    ) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for layer in (self.q, self.k, self.v, self.out, self.up, self.down):
            nn.init.normal_(layer.weight, std=narrow if layer in (self.out, self.down) else 0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result: (batch, length, width)."""
        h = self.norm1(x)
        q, k, v = (self._heads(layer(h)) for layer in (self.q, self.k, self.v))
        mixed = self.attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Reshapes (batch, length, width) to (batch, heads, length, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def count_parameters(vocabulary: int, positions: int, size: Size) -> int:
    """The number of parameters of the model, which need not exist."""
    with torch.device("meta"):
        model = GPT(vocabulary, positions, *size)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def complete(
    model: nn.Module,
    prompt: list[int],
    new: int,
    length: int,
    device: torch.device,
    temperature: float = 0.0,
    seed: int = 0,
    sync: Callable[[], object] = lambda: None,
) -> list[int]:
    """Returns ``prompt`` and up to ``new`` generated tokens, at most ``length`` in total.

    It chooses the likeliest token, or samples with ``seed`` if ``temperature`` is above 0. For each
    token it runs a forward of ``length`` tokens, without a cache of keys and values, so that all
    forwards are the same program. All ranks must pass the same arguments, and get the same result.
    ``sync``: runs the pending program; without it, each program would contain all earlier tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    row = torch.zeros(1, length, dtype=torch.long)
    row[0, : len(prompt)] = torch.tensor(prompt)
    end = min(length, len(prompt) + new)
    for place in range(len(prompt), end):
        # Two elements: a single one would be a constant, and so another program for each token.
        at = torch.tensor([place - 1] * 2).to(device)
        scores = model(row.to(device)).index_select(1, at)[0, 0].float()
        sync()
        scores = scores.cpu()
        if temperature:
            chosen = torch.multinomial((scores / temperature).softmax(0), 1, generator=draw)
        else:
            chosen = scores.argmax()
        row[0, place] = int(chosen)
    return row[0, :end].tolist()
