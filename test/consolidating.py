"""Per-rank torch files, written as the format says without the training code, and consolidated.

A model is a list of `Entry`.
"""

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from xla_fsdp.consolidate import __main__ as cli
from xla_fsdp.consolidate import consolidate_sharded_model_checkpoints

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
    about = {"format": "xla_fsdp", "version": 1, "world_size": world_size}
    optimizer = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1}]}
    files = []
    for rank, state_dict in enumerate(state_dicts):
        own = {"rank": rank, "parameters": parameters, "buffers": buffers}
        more = copy.deepcopy({"shard_metadata": about | own, "optimizer": optimizer})
        files.append({"model": state_dict, **more})
    return files


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
    for rank, content in enumerate(files):
        torch.save(content, path_of(directory, rank, len(files), prefix))
    return str(Path(directory) / prefix)


def path_of(directory, rank, world_size, prefix="ckpt"):
    return Path(directory) / f"{prefix}_rank-{rank}-of-{world_size}.pth"


class Harmful:
    """Leaves a trace when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def same(one, other):
    """Bit for bit, of any dtype."""
    assert one.dtype == other.dtype and one.shape == other.shape
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same(found[name], tensor), name


def assert_same(found, expected):
    assert list(found) == list(expected)
    assert_equal(found, expected)


def run_cli(capsys, *arguments):
    """Exit code, stdout lines and stderr lines of the command in this process."""
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def loaded(path):
    return torch.load(path, weights_only=True, mmap=True)["model"]


def assert_refused(capsys, directory, prefix, error, *mentioned, suffix=SUFFIX, save_path=None):
    """The library raises `error`, the command exits 2 with one line, and nothing is written."""
    save_path = str(Path(directory) / "full.pth" if save_path is None else save_path)
    before = {path: path.lstat().st_mtime_ns for path in Path(directory).rglob("*")}
    with pytest.raises(error) as raised:
        consolidate_sharded_model_checkpoints(prefix, suffix, save_path)
    assert type(raised.value) is error
    for text in mentioned:
        assert str(text) in str(raised.value)

    options = ("--ckpt_prefix", prefix, "--ckpt_suffix", suffix, "--save_path", save_path)
    code, out, err = run_cli(capsys, *options)
    assert (code, out) == (2, [])
    assert err[-1].startswith(f"{error.__name__}: ")
    assert all(str(text) in err[-1] for text in mentioned)
    assert len([line for line in err if "Error" in line]) == 1
    after = {path: path.lstat().st_mtime_ns for path in Path(directory).rglob("*")}
    assert after == before
