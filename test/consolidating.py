"""Runs consolidation and compares its results."""

import os
from pathlib import Path

import pytest
import torch
from per_rank_files import SUFFIX

from xla_fsdp.consolidate import __main__ as cli
from xla_fsdp.consolidate import consolidate_sharded_model_checkpoints


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
    """Same keys, and bit for bit the same tensors."""
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
