"""LLaMA with attention written out, as a kernel, and with a fused cross entropy, planned:
``python -m benchmarks.llama 1B v5litepod-16``.

No TPU is needed: what is printed is the compiler's memory and the modelled step. Blocks are
scanned, so each is recomputed in the backward. Widths are those of Llama 3.2 1B and Llama 3.1 8B
(``config.json`` of the published weights), embeddings not tied.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp
from xla_fsdp.compiler_options import FOR_LOOPS

RESULTS = Path(__file__).parent / "results"
GIB = 2**30


@dataclass(frozen=True)
class Llama:
    """Sizes of a model. ``groups``: heads of keys and values."""

    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    batch: int  # sequences a device
    length: int

    @property
    def dim(self) -> int:
        return self.width // self.heads


MODELS = {
    "1B": Llama(16, 2048, 32, 8, 8192, 128256, 4, 2048),
    "8B": Llama(32, 4096, 32, 8, 14336, 128256, 2, 8192),
}


class Block(nn.Module):
    """Shapes: b batch, s length, h heads, g groups, d head dimension."""

    def __init__(self, sizes: Llama, implementation: str):
        super().__init__()
        self.sizes, self.implementation = sizes, implementation
        width, inner, dim = sizes.width, sizes.inner, sizes.dim
        self.norm_1, self.norm_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q = nn.Linear(width, sizes.heads * dim, bias=False)
        self.k = nn.Linear(width, sizes.groups * dim, bias=False)
        self.v = nn.Linear(width, sizes.groups * dim, bias=False)
        self.out = nn.Linear(sizes.heads * dim, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.out(self._attend(self.norm_1(x), cos, sin))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _attend(self, x, cos, sin):
        from xla_fsdp.layers import scaled_dot_product_attention

        def heads(y):  # (b, s, h d) to (b, h, s, d)
            return y.unflatten(-1, (-1, self.sizes.dim)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        mixed = scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v,
            is_causal=True, enable_gqa=True, implementation=self.implementation,
        )  # fmt: skip
        return mixed.transpose(1, 2).flatten(2)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (b, h, s, d); cos and sin (s, d).

    The halves of d change places by a product: cut and put together they would be copies, in whose
    layout every register is filled to a quarter.
    """
    half = x.shape[-1] // 2
    one = torch.eye(half, dtype=x.dtype)
    zero = torch.zeros_like(one)
    turn = torch.cat([torch.cat([zero, one], 1), torch.cat([-one, zero], 1)], 0)
    return x * cos + (x @ turn.to(x.device)) * sin


def angles(sizes: Llama, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 500000.0 ** (-torch.arange(0, sizes.dim, 2) / sizes.dim)
    turns = torch.outer(torch.arange(sizes.length), frequencies).repeat(1, 2)
    return turns.cos().bfloat16().to(device), turns.sin().bfloat16().to(device)


class Model(nn.Module):
    """Returns the mean cross entropy of the next token."""

    def __init__(self, sizes: Llama, implementation: str, fused: bool):
        super().__init__()
        self.sizes, self.fused = sizes, fused
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = xla_fsdp.scan_blocks(
            (Block(sizes, implementation) for _ in range(sizes.layers)),
            compute_dtype=torch.bfloat16,
        )
        self.norm = nn.RMSNorm(sizes.width, 1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens, labels):
        from xla_fsdp.layers import linear_cross_entropy

        cos, sin = angles(self.sizes, tokens.device)
        x = self.norm(self.blocks(self.embed(tokens), cos, sin))
        if self.fused:
            return linear_cross_entropy(x, self.head.weight, labels)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def step_of(sizes: Llama, implementation: str, fused: bool) -> Callable[[], torch.Tensor]:
    """A training step for :func:`xla_fsdp.plan`: AdamW, bfloat16, clipped at a norm of 1."""

    def step() -> torch.Tensor:
        model = xla_fsdp.XlaFullyShardedDataParallel(
            Model(sizes, implementation, fused), compute_dtype=torch.bfloat16
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.zeros(sizes.batch, sizes.length, dtype=torch.long).to("xla")
        loss = model(tokens, tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


WAYS = {
    "written out": ("math", False),
    "kernel": ("kernel", False),
    "kernel, fused cross entropy": ("kernel", True),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("slice")
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all")
    parser.add_argument("--batch", type=int, help="sequences a device")
    parser.add_argument("--layers", type=int, help="fewer blocks")
    parser.add_argument("--save", type=Path, help="folder for the reports")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    flags = parser.parse_args(arguments)
    given = {"batch": flags.batch, "layers": flags.layers}
    sizes = MODELS[flags.model]
    sizes = Llama(**{**vars(sizes), **{k: v for k, v in given.items() if v}})
    rows = {}
    print("| | step, ms (model) | MFU, % | exposed collectives, ms | HBM, GiB | fits |")
    print("|---|---:|---:|---:|---:|---|")
    for way in flags.way or WAYS:
        step = step_of(sizes, *WAYS[way])
        report = xla_fsdp.plan(step, flags.slice, ranks=[0], title=way, compiler_options=FOR_LOOPS)
        timing = report.timing
        rows[way] = {
            "step_ms": 1e3 * timing.step, "mfu": 100 * timing.mfu,
            "exposed_ms": 1e3 * timing.exposed,
            "hbm_gib": report.memory.required / GIB, "fits": report.fits,
        }  # fmt: skip
        figures = " | ".join(f"{value:,.1f}" for value in list(rows[way].values())[:4])
        print(f"| {way} | {figures} | {'yes' if report.fits else 'no'} |", flush=True)
        if flags.save:
            flags.save.mkdir(parents=True, exist_ok=True)
            report.save(flags.save / f"{flags.model}-{flags.slice}-{way}.json")
    if flags.out:
        flags.out.write_text(json.dumps({**vars(flags), "out": None, "rows": rows}, default=str))


if __name__ == "__main__":
    sys.exit(main())
