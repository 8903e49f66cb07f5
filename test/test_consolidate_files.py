"""Which files are read, which file is written, and that it is written whole or not at all."""

import os
import stat

import pytest
import torch
from consolidating import assert_refused, assert_same
from per_rank_files import SUFFIX, expected_state_dict, path_of, rank_files, save, small_model

from xla_fsdp.consolidate import consolidate_sharded_model_checkpoints, errors


def write(directory, world_size=2, prefix="ckpt"):
    return save(rank_files(small_model(), world_size), directory, prefix)


@pytest.mark.parametrize("prefix", ["a[1]", "a*", "a?b", "[", "a]", "[!a]", "with space", "ünï"])
def test_prefix_is_literal(tmp_path, prefix):
    (tmp_path / prefix).mkdir()
    path = write(tmp_path / prefix, prefix=prefix)
    write(tmp_path / prefix, world_size=3, prefix="a1")  # what the pattern a[1] would match
    write(tmp_path / prefix, world_size=3, prefix="axb")
    full, written = consolidate_sharded_model_checkpoints(path, SUFFIX)
    assert_same(full, expected_state_dict(small_model()))
    assert os.path.dirname(written) == str(tmp_path / prefix)


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(".")
    for save_path in ("", "full.pth", "./other.pth"):
        _, path = consolidate_sharded_model_checkpoints("ckpt", SUFFIX, save_path)
        assert path == (save_path or "ckpt_consolidated.pth")
        assert os.path.isfile(path)


@pytest.mark.parametrize("save_name", ["", "ckpt_full.pth", "ckpt_rank-x-of-2.pth"])
def test_second_run_ignores_the_output_of_the_first(tmp_path, save_name):
    prefix = write(tmp_path)
    save_path = str(tmp_path / save_name) if save_name else ""
    for _ in range(2):  # the default suffix *.pth matches the output
        full, path = consolidate_sharded_model_checkpoints(prefix, save_path=save_path)
        assert_same(full, expected_state_dict(small_model()))
        assert os.path.dirname(path) == str(tmp_path)


def test_results_of_other_programs(tmp_path, capsys):
    """That of the in-tree class is ignored under its default name, and only there."""
    prefix = write(tmp_path)
    default, other = prefix + "_consolidated.pth", prefix + "_other.pth"
    torch.save({"model": {"w": torch.zeros(2)}}, default)
    full, _ = consolidate_sharded_model_checkpoints(prefix, save_path=str(tmp_path / "o.pt"))
    assert_same(full, expected_state_dict(small_model()))
    torch.save({"model": {"w": torch.zeros(2)}}, other)
    assert_refused(capsys, tmp_path, prefix, errors.MissingMetadataError, other, suffix="*.pth")
    torch.save({"weights": 3}, default)
    assert_refused(capsys, tmp_path, prefix, errors.ForeignFileError, default, suffix="*.pth")


def test_only_an_earlier_output_is_there(tmp_path, capsys):
    prefix = write(tmp_path)
    _, path = consolidate_sharded_model_checkpoints(prefix)
    for rank in range(2):
        path_of(tmp_path, rank, 2).unlink()
    assert_refused(capsys, tmp_path, prefix, errors.MissingRankError, path, suffix="*.pth")


def test_output_has_ordinary_permissions(tmp_path):
    prefix = write(tmp_path)
    mask = os.umask(0o027)
    try:
        _, path = consolidate_sharded_model_checkpoints(prefix, SUFFIX)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640


def test_inputs_are_left_as_they_were_and_nothing_is_printed(tmp_path, capfd):
    prefix = write(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    full, path = consolidate_sharded_model_checkpoints(prefix, SUFFIX, save_model=False)
    assert_same(full, expected_state_dict(small_model()))
    assert path is None
    for tensor in full.values():
        tensor.zero_()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert capfd.readouterr() == ("", "")
