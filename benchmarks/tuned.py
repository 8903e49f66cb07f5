"""What ``xla_fsdp.tune`` finds for GPT-3 of 13 billion parameters:
``python -m benchmarks.tuned v5litepod-64 --budget 4``.

No TPU is needed. The model is that of ``examples/train_gpt.py``, with its attention and its cross
entropy; by hand its blocks are a loop, sharded over all ranks (``train_gpt.py --arch=13B --plan``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import xla_fsdp

EXAMPLES = Path(__file__).parent.parent / "examples"
LENGTH = 2048


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned", description=__doc__)
    parser.add_argument("slice")
    parser.add_argument("--arch", default="13B", help="of the family in examples/gpt.py")
    parser.add_argument("--batch", type=int, default=8, help="sequences a device")
    parser.add_argument("--budget", type=int, default=4, help="compilations at most")
    parser.add_argument("--save", type=Path, help="file for all figures, JSON")
    flags = parser.parse_args(arguments)
    sys.path.insert(0, str(EXAMPLES))
    import gpt

    def step(settings: xla_fsdp.ShardingSettings) -> None:
        from xla_fsdp.layers import linear_cross_entropy, scaled_dot_product_attention

        narrow = {"compute_dtype": torch.bfloat16}
        model = gpt.GPT(
            gpt.VOCABULARY, gpt.POSITIONS, **gpt.FAMILY[flags.arch]._asdict(),
            join=lambda blocks: settings.join(blocks, **narrow),
            attention=scaled_dot_product_attention, cross_entropy=linear_cross_entropy,
        )  # fmt: skip
        model = settings.wrap_root(model, **narrow)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.zeros(settings.batch, LENGTH, dtype=torch.long).to("xla")
        model(tokens, tokens).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = xla_fsdp.tune(
        step, flags.slice, batch=flags.batch, budget=flags.budget, title=f"GPT {flags.arch}",
    )  # fmt: skip
    print(found)
    if flags.save:
        flags.save.write_text(found.to_json())


if __name__ == "__main__":
    sys.exit(main())
