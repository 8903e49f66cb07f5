"""Writes checkpoints with torch_xla's own class: ``python test_consolidate_intree_writer.py DIR``.

Run as a process of its own by test_consolidate_intree.py, so that the tests themselves never start
the XLA runtime. All ranks are built one after the other in this process: no collective runs.
Each case becomes DIR/CASE/{rank-R-of-N.pth, plain.pt}.
"""

import gc
import os
import sys
from pathlib import Path

import torch
from torch import nn

DIM0 = {"shard_param_on_dim_0": True}
FLAT = {"flatten_parameters": True}
# name: (world size, constructor arguments, model, wrap children too, move to XLA before wrapping)
CASES = {
    **{
        f"{name}-{world_size}": (world_size, options, "vision", True, False)
        for world_size in (1, 2, 3, 4, 8)
        for name, options in (("plain", {}), ("flat", FLAT), ("dim0", DIM0))
    },
    "root-only": (2, {}, "vision", False, False),
    "flat-root-only": (3, FLAT, "vision", False, False),
    "bfloat16-buffers": (2, {"buffer_dtype": torch.bfloat16}, "vision", True, True),
    "bfloat16-buffers-flat": (2, {"buffer_dtype": torch.bfloat16, **FLAT}, "vision", True, True),
    "bfloat16-buffers-cpu": (2, {"buffer_dtype": torch.bfloat16}, "vision", True, False),
    "frozen-flat": (2, FLAT, "frozen", False, False),
    "tied": (2, {}, "tied", False, False),
    "tied-flat": (2, FLAT, "tied", False, False),
    "shared-module": (2, {}, "shared", True, False),
    "named-flat-param": (2, {}, "named", False, False),
}


class Vision(nn.Module):
    """Nested modules, a scalar, an empty parameter, buffers of three dtypes."""

    def __init__(self, scalar):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.tail = nn.Linear(4, 5, bias=False)
        if scalar:
            self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("table", torch.arange(4) / 8)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.tail(self.block(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.emb(x))


class Shared(nn.Module):
    """One module, wrapped by itself, used under two names."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(3, 3)
        self.again = self.block

    def forward(self, x):
        return self.again(self.block(x))


class Named(nn.Module):
    """Names that look like the wrapper's own but are the model's."""

    def __init__(self):
        super().__init__()
        self.flat_param_0 = nn.Parameter(torch.randn(3, 2))
        self.my_fpw_module = nn.Linear(2, 2)

    def forward(self, x):
        return self.my_fpw_module(x @ self.flat_param_0)


def build(kind, options):
    """The unwrapped model; the same weights at every call."""
    torch.manual_seed(0)
    if kind == "tied":
        return Tied()
    if kind == "shared":
        return Shared()
    if kind == "named":
        return Named()
    # Sharding by rows cannot hold a scalar.
    model = Vision(scalar=not options.get("shard_param_on_dim_0"))
    model.block[1].running_mean.copy_(torch.arange(4) / 2)
    if kind == "frozen":
        model.block[0].requires_grad_(False)
    return model


def write_case(directory, world_size, options, kind, nested, on_device):
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    directory.mkdir()
    torch.save(build(kind, options).state_dict(), directory / "plain.pt")
    for rank in range(world_size):
        arguments = {
            **options,
            "sharding_groups": [list(range(world_size))],
            "sharding_rank": rank,
            "sharding_world_size": world_size,
        }
        model = build(kind, options)
        if on_device:
            model = model.to(torch_xla.device())
        if nested:
            child = XlaFullyShardedDataParallel(model.block, **arguments)
            model.block = child
            if kind == "shared":
                model.again = child
        model = XlaFullyShardedDataParallel(model, **arguments)
        content = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        xm.save(content, str(directory / f"rank-{rank}-of-{world_size}.pth"), master_only=False)


def main(directory):
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla.distributed.fsdp  # noqa: F401

    gc.freeze()  # the class collects all garbage for each wrapper: not among what is imported
    for name, case in CASES.items():
        write_case(Path(directory) / name, *case)


if __name__ == "__main__":
    main(sys.argv[1])
