"""A small language model that has every kind of parameter that is hard to shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 11
WIDTH = 12
SEQUENCE = 5
GLOBAL_BATCH = 24  # two micro-batches, each for 1, 2, 3 or 4 ranks


class Attention(nn.Module):
    """Fused projection cut into chunks, einsum, and weights used through views."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Parameter(torch.empty(heads, width // heads, width))
        nn.init.normal_(self.out, std=0.2)

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.split(x.shape[-1])
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for weight, bias in zip(weights, biases, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.einsum("bhsd,hdw->bsw", mixed, self.out)


class Block(nn.Module):
    """``short``: without what one block of a model is enough for, which is most to compile."""

    def __init__(self, width: int, short: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        hidden = 23 if short else 7  # odd: shards are padded. 23 * 12 elements reach three ranks
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.again = nn.Linear(width, hidden)
        self.gain = nn.Parameter(torch.tensor(0.7))  # 0-d
        self.short = short
        if short:
            return
        self.attention = Attention(width, 2)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.tiny = nn.Parameter(torch.tensor([0.1, -0.2]))  # smaller than the world
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(width, 3)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor, *, causal: bool) -> dict[str, torch.Tensor]:
        if self.short:
            return {"x": x + self.gain * self.down(self.hidden(self.norm(x)))}
        x = x + self.attention(self.norm(x), causal=causal)
        hidden = self.hidden(x) + self.empty.sum()
        x = x + self.gain * self.down(hidden) + self.frozen(x) * self.tiny[0] + self.tiny[1]
        return {"x": x + self.conv(x.transpose(1, 2)).transpose(1, 2)}

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x)) + torch.tanh(self.again(x))


class Zoo(nn.Module):
    def __init__(self, blocks: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(SEQUENCE, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, short=number > 0) for number in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tie()

    def tie(self) -> None:
        """Shares what is shared; moving a module to an XLA device unshares it."""
        self.head.weight = self.embed.weight  # across units when `embed` is one
        for block in self.blocks:
            block.again.weight = block.up.weight  # inside a unit

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, causal=True)["x"]
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches(steps: int) -> list[torch.Tensor]:
    """Token batches of shape (GLOBAL_BATCH, SEQUENCE), the same in every process."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=generator)
        for _ in range(steps)
    ]
