"""Writes per-rank torch files as the format says, without the training code.

A model is a list of `Entry`.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch

SUFFIX = "_rank-*-of-*.pth"


@dataclass
class Entry:
    """One key of the state_dict: members [(names, tensor)] of a parameter, or a buffer."""

    key: str
    layout: str  # "flat", "dim0" or "buffer"
    members: list = field(default_factory=list)
    stored: torch.dtype | None = None  # buffers: dtype in the checkpoint
    alias_keys: tuple = ()  # tied names that the state_dict lists itself


def shards_of(entry, world_size, multiple=1):
    """Equal shards, padded with NaN (not zeros) so that padding in a result is noticed."""
    if entry.layout == "flat":
        whole = torch.cat([tensor.reshape(-1) for _, tensor in entry.members])
    else:
        whole = entry.members[0][1]
    chunk = -(-whole.shape[0] // (world_size * multiple)) * multiple
    padding = whole.new_full((chunk * world_size - whole.shape[0], *whole.shape[1:]), float("nan"))
    return [
        part.clone()
        for part in torch.cat([whole, padding]).reshape(world_size, chunk, *whole.shape[1:])
    ]


def rank_files(entries, world_size, multiple=1):
    parameters, buffers = {}, {}
    state_dicts = [{} for _ in range(world_size)]
    for entry in entries:
        if entry.layout == "buffer":
            ((_, tensor),) = entry.members
            stored = tensor if entry.stored is None else tensor.to(entry.stored)
            if entry.stored is not None:
                buffers[entry.key] = str(tensor.dtype).removeprefix("torch.")
            for rank, state_dict in enumerate(state_dicts):
                # Ranks other than 0 disagree: rank 0's buffers must be the ones taken.
                state_dict[entry.key] = stored.clone() if rank == 0 else torch.zeros_like(stored)
            continue
        members, offset = [], 0
        for names, tensor in entry.members:
            members.append({"names": list(names), "shape": list(tensor.shape), "offset": offset})
            offset += tensor.numel()
        parameters[entry.key] = {"layout": entry.layout, "numel": offset, "members": members}
        shards = shards_of(entry, world_size, multiple)
        for state_dict, shard in zip(state_dicts, shards, strict=True):
            for key in (entry.key, *entry.alias_keys):
                state_dict[key] = shard
    return [
        {
            "model": state_dict,
            "shard_metadata": {
                "format": "xla_fsdp",
                "version": 1,
                "world_size": world_size,
                "rank": rank,
                "parameters": copy.deepcopy(parameters),
                "buffers": dict(buffers),
            },
            "optimizer": {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1}]},
        }
        for rank, state_dict in enumerate(state_dicts)
    ]


def expected_state_dict(entries):
    full = {}
    for entry in entries:
        for names, tensor in entry.members:
            for name in names:
                full[name] = tensor
    return full


def small_model(seed=0):
    """Every kind of entry: flat with several members, rows, tied, scalar, empty, buffers."""
    make = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=make)

    return [
        Entry("emb.weight", "dim0", [(("emb.weight", "head.weight"), rand(5, 3))]),
        Entry(
            "block.flat_param_0",
            "flat",
            [
                (("block.fc.weight", "block.tied.weight"), rand(3, 4)),
                (("block.scale",), rand()),
                (("block.empty",), rand(0, 7)),
                (("block.fc.bias",), rand(3)),
            ],
        ),
        Entry("norm.weight", "flat", [(("norm.weight",), rand(3))]),
        Entry("norm.half", "flat", [(("norm.half",), rand(2, 2).to(torch.bfloat16))]),
        Entry("nothing", "flat", [(("nothing",), rand(0))]),
        Entry("scalar", "flat", [(("scalar",), rand())]),
        Entry("norm.mean", "buffer", [(("norm.mean",), torch.arange(3.0))], torch.bfloat16),
        Entry("norm.steps", "buffer", [(("norm.steps",), torch.tensor(7))]),
    ]


def save(files, directory, prefix="ckpt"):
    """Write the rank files; returns the prefix to consolidate."""
    for rank, content in enumerate(files):
        torch.save(content, path_of(directory, rank, len(files), prefix))
    return str(Path(directory) / prefix)


def path_of(directory, rank, world_size, prefix="ckpt"):
    return Path(directory) / f"{prefix}_rank-{rank}-of-{world_size}.pth"
