"""Decoders for benchmarks. The blocks are scanned, so the compile time does not grow with depth;
each block is recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp
from xla_fsdp import ShardingStrategy

from .model import adamw_step


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. ``gpt``: layer norms, biases, learned positions, tied embeddings, and
    two matrices around GELU. Otherwise: RMS norms, rotary positions, and two matrices around ReLU
    or, with ``gated``, three around SiLU.

    ``groups``: heads of keys and values. ``batch``: sequences per device. ``kernel``: attention
    without scores in memory. ``fused``: the full logits are never in memory, and are computed
    twice. ``theta``: the base of rotary positions. ``weights``: the dtype of parameters, and so of
    optimizer state. ``repeated``: keys and values are copied for each query head. ``by_heads``:
    blocks have ``head_dim``, so the wrapper computes heads in the matmuls. ``keep``, ``prefetch``
    and ``offload``: as in ``scan_blocks``.
    """

    layers: int
    width: int
    heads: int
    dim: int
    inner: int
    vocabulary: int
    length: int
    batch: int
    groups: int = 0
    gpt: bool = False
    gated: bool = True
    tied: bool = False
    kernel: bool = True
    fused: bool = False
    theta: float = 10000.0
    weights: str = "float32"
    repeated: bool = False
    by_heads: bool = False
    keep: tuple[str, ...] = ()
    prefetch: bool = False
    offload: bool = False

    @property
    def of_block(self) -> int:
        """Parameters of the matrices of one block."""
        groups = self.groups or self.heads
        attention = self.width * self.dim * (2 * self.heads + 2 * groups)
        return attention + (3 if self.gated and not self.gpt else 2) * self.width * self.inner

    @property
    def parameters(self) -> int:
        """Parameters of all matrices; a tied embedding counts once, norms and biases do not."""
        tables = (1 if self.tied or self.gpt else 2) * self.vocabulary * self.width
        return self.layers * self.of_block + tables

    @property
    def tokens(self) -> int:
        """Tokens of a device in a step."""
        return self.batch * self.length

    def flops(self, causal: float = 1.0) -> float:
        """FLOPs of a step on one device, as for MFU: 6 for each token and matrix parameter that it
        is multiplied with, and the share ``causal`` of attention."""
        multiplied = self.layers * self.of_block + self.vocabulary * self.width
        attention = 12 * self.layers * self.heads * self.dim * self.length * causal
        return self.tokens * (6 * multiplied + attention)


class Block(nn.Module):
    """Shapes: b batch, s length, h heads, g groups, d head dimension."""

    def __init__(self, sizes: Decoder):
        super().__init__()
        self.sizes = sizes
        if sizes.by_heads:
            self.head_dim = sizes.dim
        width = sizes.width
        keys = (sizes.groups or sizes.heads) * sizes.dim
        dtype = getattr(torch, sizes.weights)

        def norm() -> nn.Module:
            if sizes.gpt:
                return nn.LayerNorm(width, dtype=dtype)
            return nn.RMSNorm(width, 1e-5, dtype=dtype)

        def linear(inputs: int, outputs: int) -> nn.Module:
            return nn.Linear(inputs, outputs, bias=sizes.gpt, dtype=dtype)

        self.norm_1, self.norm_2 = norm(), norm()
        self.q = linear(width, sizes.heads * sizes.dim)
        self.k = linear(width, keys)
        self.v = linear(width, keys)
        self.out = linear(sizes.heads * sizes.dim, width)
        if sizes.gated and not sizes.gpt:
            self.gate = linear(width, sizes.inner)
        self.up = linear(width, sizes.inner)
        self.down = linear(sizes.inner, width)

    def forward(self, x, cos=None, sin=None):
        x = x + self.out(self._attend(self.norm_1(x), cos, sin))
        h = self.norm_2(x)
        if self.sizes.gpt:
            return x + self.down(F.gelu(self.up(h), approximate="tanh"))
        if self.sizes.gated:
            return x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x + self.down(F.relu(self.up(h)))

    def _attend(self, x, cos, sin):
        from xla_fsdp.layers import scaled_dot_product_attention

        def heads(y):  # (b, s, h d) to (b, h, s, d)
            return y.unflatten(-1, (-1, self.sizes.dim)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if cos is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.sizes.repeated:
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        way = "kernel" if self.sizes.kernel else "math"
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, implementation=way
        )
        return mixed.transpose(1, 2).flatten(2)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (b, h, s, d); cos and sin (s, d).

    The halves of d are swapped by a matmul. Slicing and concatenating them would be copies with a
    layout that fills only a quarter of each register.
    """
    half = x.shape[-1] // 2
    one = torch.eye(half, dtype=x.dtype)
    zero = torch.zeros_like(one)
    turn = torch.cat([torch.cat([zero, one], 1), torch.cat([-one, zero], 1)], 0)
    return x * cos + (x @ turn.to(x.device)) * sin


class Model(nn.Module):
    """Returns the mean cross entropy of the next token."""

    def __init__(self, sizes: Decoder, join: Callable[[Iterable[nn.Module]], nn.Module]):
        super().__init__()
        self.sizes = sizes
        width, dtype = sizes.width, getattr(torch, sizes.weights)
        self.embed = nn.Embedding(sizes.vocabulary, width, dtype=dtype)
        if sizes.gpt:
            self.places = nn.Embedding(sizes.length, width, dtype=dtype)
        self.blocks = join(Block(sizes) for _ in range(sizes.layers))
        if sizes.gpt:
            self.norm = nn.LayerNorm(width, dtype=dtype)
        else:
            self.norm = nn.RMSNorm(width, 1e-5, dtype=dtype)
        if not (sizes.tied or sizes.gpt):
            self.head = nn.Linear(width, sizes.vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens, labels):
        from xla_fsdp.layers import linear_cross_entropy

        x = self.embed(tokens)
        if self.sizes.gpt:
            x = x + self.places(torch.arange(self.sizes.length, device=tokens.device))
            x = self.blocks(x)
        else:
            x = self.blocks(x, *_angles(self.sizes, tokens.device))
        x = self.norm(x)
        if self.sizes.fused:
            return linear_cross_entropy(x, self._head_weight, labels)
        logits = F.linear(x, self._head_weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    @property
    def _head_weight(self) -> nn.Parameter:
        return (self.embed if self.sizes.tied or self.sizes.gpt else self.head).weight


def _angles(sizes: Decoder, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = sizes.theta ** (-torch.arange(0, sizes.dim, 2) / sizes.dim)
    turns = torch.outer(torch.arange(sizes.length), frequencies).repeat(1, 2)
    return turns.cos().bfloat16().to(device), turns.sin().bfloat16().to(device)


def token_step(model: nn.Module, batch: int, length: int) -> torch.Tensor:
    """Trains a step of a language model that returns its loss; gradients are clipped at 1."""

    def loss() -> torch.Tensor:
        tokens = torch.zeros(batch, length, dtype=torch.long).to("xla")
        return model(tokens, tokens)

    return adamw_step(model, loss, lr=1e-4, clip_norm=1.0)


def decoder_step(sizes: Decoder, replicas: int = 1) -> Callable[[], torch.Tensor]:
    """A training step for :func:`xla_fsdp.plan`: AdamW, bfloat16, gradients clipped at a norm of 1.

    ``replicas``: the number of groups of neighbouring ranks that each have all parameters, sharded.
    Only sums of gradients are sent between groups.
    """

    def step() -> torch.Tensor:
        import torch_xla.runtime as xr

        wrapping: dict = {"compute_dtype": torch.bfloat16}
        if replicas > 1:
            mesh = torch.arange(xr.world_size()).view(replicas, -1)
            wrapping |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        else:  # also over several slices
            wrapping |= {"sharding_strategy": ShardingStrategy.FULL_SHARD}
        loop = {"keep": sizes.keep, "prefetch": sizes.prefetch, "offload": sizes.offload}
        model = Model(sizes, lambda blocks: xla_fsdp.scan_blocks(blocks, **loop, **wrapping))
        model = xla_fsdp.XlaFullyShardedDataParallel(model, **wrapping)
        return token_step(model, sizes.batch, sizes.length)

    return step
