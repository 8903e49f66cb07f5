"""Run ``xla_fsdp.tune`` on large models: ``python -m benchmarks.tuned v5litepod-64 --model 13B``.

No TPU is needed. The model is GPT-3 of 13 billion parameters (or another size in
``examples/gpt.py``), as in ``examples/train_gpt.py``; LLaMA (``--model "LLaMA 8B"``), as in
``benchmarks.llama``; or workload S (``--model S``). The first two use the attention kernel and the
fused cross entropy. docs/design/benchmarks.md compares the results with manual choices: for the
first two models the blocks in one loop, sharded over all ranks; for workload S each block a unit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import xla_fsdp
from xla_fsdp import ShardingSettings

from . import llama
from .decoder import Model
from .workload_s import Network

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
        _train(model, settings, LENGTH)

    return step


def llama_step(name: str) -> Callable[[ShardingSettings], None]:
    """A step of a model of ``benchmarks.llama``, with the same length of sequences."""
    sizes = replace(llama.MODELS[name], **llama.WAYS["kernel, fused cross entropy"])

    def step(settings: ShardingSettings) -> None:
        _train(Model(sizes, lambda blocks: settings.join(blocks, **NARROW)), settings, sizes.length)

    return step


def step_s(settings: ShardingSettings) -> None:
    """A step of workload S."""
    model: Any = settings.wrap(Network(lambda block: block), **NARROW)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(settings.batch or 32, 256, 1024).to("xla")
    model(inputs).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(model: torch.nn.Module, settings: ShardingSettings, length: int) -> None:
    wrapped: Any = settings.wrap_root(model, **NARROW)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    tokens = torch.zeros(settings.batch, length, dtype=torch.long).to("xla")
    wrapped(tokens, tokens).backward()
    wrapped.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned", description=__doc__)
    parser.add_argument("slice")
    parser.add_argument("--model", default="13B", help='default: %(default)s; "LLaMA 8B", S')
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="sequences per device")
    parser.add_argument("--budget", type=int, default=4, help="largest number of compilations")
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE",
                        help="fix a setting to a number")  # fmt: skip
    parser.add_argument("--save", type=Path, help="file for all figures, JSON")
    flags = parser.parse_args(arguments)
    name = flags.model
    if name == "S":
        step = step_s
    else:
        step = llama_step(name[len(LLAMA) :]) if name.startswith(LLAMA) else gpt_step(name)
    search: dict[str, Collection[Any]] = {
        setting: [int(value)] for setting, value in (one.split("=") for one in flags.fix)
    }
    found = xla_fsdp.tune(
        step, flags.slice, batch=flags.batch, budget=flags.budget, search=search, title=name
    )
    print(found)
    if flags.save:
        flags.save.write_text(found.to_json())


if __name__ == "__main__":
    sys.exit(main())
