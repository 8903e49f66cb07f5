"""Run ``xla_fsdp.tune`` on large models: ``python -m benchmarks.tuned v5litepod-64 --model 13B``.

No TPU is needed. The model is GPT-3 of 13 billion parameters (or another size in
``examples/gpt.py``), as in ``examples/train_gpt.py``; LLaMA (``--model "LLaMA 8B"``), as in
``benchmarks.llama``; workload S (``--model S``); or ViT-L/16 (``--model ViT-L``), whose own step
recomputes each block. The first two use the attention kernel and the fused cross entropy.
docs/design/benchmarks.md compares the results with manual choices: for the first two models the
blocks in one loop, sharded over all ranks; for workload S each block a unit.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp
from xla_fsdp import ShardingSettings

from . import llama
from .decoder import Model, token_step
from .model import Block, adamw_step
from .workload_s import Network, train

EXAMPLES = Path(__file__).parent.parent / "examples"
LENGTH = 2048
LLAMA = "LLaMA "
NARROW: dict[str, Any] = {"compute_dtype": torch.bfloat16}


def gpt_step(name: str) -> Callable[[ShardingSettings], None]:
    """A step of a model of ``examples/gpt.py``, with sequences of 2048."""
    sys.path.insert(0, str(EXAMPLES))
    import gpt

    def step(settings: ShardingSettings) -> None:
        from xla_fsdp.layers import linear_cross_entropy, scaled_dot_product_attention

        model = gpt.GPT(
            gpt.VOCABULARY, gpt.POSITIONS, **gpt.FAMILY[name]._asdict(),
            join=lambda blocks: settings.join(blocks, **NARROW),
            attention=scaled_dot_product_attention, cross_entropy=linear_cross_entropy,
        )  # fmt: skip
        token_step(settings.wrap_root(model, **NARROW), settings.batch, LENGTH)

    return step


def llama_step(name: str) -> Callable[[ShardingSettings], None]:
    """A step of a model of ``benchmarks.llama``, with the same length of sequences, and with heads
    computed in the matmuls, as in models of transformers."""
    sizes = replace(llama.MODELS[name], **llama.WAYS["kernel, fused cross entropy"], by_heads=True)

    def step(settings: ShardingSettings) -> None:
        model = Model(sizes, lambda blocks: settings.join(blocks, **NARROW))
        token_step(settings.wrap_root(model, **NARROW), settings.batch, sizes.length)

    return step


def step_s(settings: ShardingSettings) -> None:
    """A step of workload S."""
    train(settings.wrap(Network(lambda block: block), **NARROW), settings.batch or 32)


class ViT(nn.Module):
    """ViT-L/16: 24 blocks of width 1024 on 196 patches of 16 x 16 pixels and a class token."""

    def __init__(self, blocks: int = 24, width: int = 1024) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(Block(width, 16, causal=False) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images``: (batch, 3, 224, 224); returns (batch, 1000) logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, patches, width)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def step_of_vit(settings: ShardingSettings) -> None:
    """A step of ViT-L/16."""
    model: Any = settings.wrap(ViT(), **NARROW)

    def loss() -> torch.Tensor:
        images = torch.zeros(settings.batch, 3, 224, 224).to("xla")
        labels = torch.zeros(settings.batch, dtype=torch.long).to("xla")
        return F.cross_entropy(model(images).float(), labels)

    adamw_step(model, loss)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned", description=__doc__)
    parser.add_argument("slice")
    parser.add_argument("--model", default="13B", help='default: %(default)s; "LLaMA 8B", S, ViT-L')
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="sequences per device")
    parser.add_argument("--budget", type=int, default=4, help="largest number of compilations")
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE",
                        help="fix a setting to a value, as Python writes it")  # fmt: skip
    parser.add_argument("--compiler", help="as in xla_fsdp.plan: a version of libtpu, ...")
    parser.add_argument("--save", type=Path, help="file for all figures, JSON")
    flags = parser.parse_args(arguments)
    name, baseline = flags.model, None
    if name == "S":
        step = step_s
    elif name == "ViT-L":
        step = step_of_vit
        baseline = partial(step, ShardingSettings(batch=flags.batch[0], recompute="all"))
    else:
        step = llama_step(name[len(LLAMA) :]) if name.startswith(LLAMA) else gpt_step(name)
    search: dict[str, Collection[Any]] = {
        setting: [ast.literal_eval(value)]
        for setting, value in (one.split("=", 1) for one in flags.fix)
    }
    found = xla_fsdp.tune(
        step, flags.slice, batch=flags.batch, baseline=baseline, budget=flags.budget,
        search=search, title=name, compiler=flags.compiler,
    )  # fmt: skip
    print(found)
    if flags.save:
        flags.save.write_text(found.to_json())


if __name__ == "__main__":
    sys.exit(main())
