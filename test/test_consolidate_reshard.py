"""A checkpoint of another number of ranks: the same values, cut as training cuts them."""

from dataclasses import replace

import pytest
import torch
from consolidating import assert_equal, loaded, run_cli
from per_rank_files import SUFFIX, expected_state_dict, rank_files, save, small_model
from sharded_files import everything, small_checkpoint, write_checkpoint

from xla_fsdp.consolidate import (
    consolidate_checkpoint,
    errors,
    reshard_checkpoint,
    verify_checkpoint,
)
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint
from xla_fsdp.sharding.layout import Layout


def values_of(path):
    return everything(ShardedCheckpoint(path))


@pytest.fixture
def model(tmp_path):
    make = torch.Generator().manual_seed(3)
    tensors = {
        ("a", "tied"): torch.randn(100, 30, generator=make),
        "b": torch.randn(7, 300, generator=make).to(torch.bfloat16),
        "c": torch.randn((), generator=make),
        "empty": torch.zeros(0, 4),
    }
    state = {
        name: {"step": torch.tensor(3.0), "m": torch.randn(shape, generator=make)}
        for name, shape in (("a", (100, 30)), ("b", (7, 300)), ("c", ()), ("empty", (0, 4)))
    }
    # A tensor without dimensions is not cut: its step and its m look alike, and both stand alone.
    optimizer = {"groups": [{"params": ["a", "b", "c", "empty"], "lr": 0.5}], "state": state}
    buffers = {"n": (torch.tensor([4.0, 5.0]), None)}
    more = {"scheduler": {"epoch": 4}, "extra": [1, 2], "extra_state": {"x": "y"}}
    write_checkpoint(tmp_path / "ckpt", tensors, optimizer, 3, 11, buffers, **more)
    return tmp_path / "ckpt"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("by_way_of", [None, 5])
def test_same_values_in_other_pieces(model, tmp_path, world_size, by_way_of):
    source = model
    if by_way_of is not None:
        source = tmp_path / "between"
        reshard_checkpoint(model, by_way_of, source)
    result = reshard_checkpoint(source, world_size, tmp_path / "out")
    assert (result.world_size, result.path) == (world_size, str(tmp_path / "out"))
    assert_equal(values_of(tmp_path / "out"), values_of(model))

    checkpoint, old = ShardedCheckpoint(tmp_path / "out"), ShardedCheckpoint(model)
    assert checkpoint.manifest.save_id != old.manifest.save_id
    changed = {"save_id": "", "world_size": 0, "files": (), "sharding_rules": None}
    assert replace(checkpoint.manifest, **changed) == replace(old.manifest, **changed)
    for name, tensor in checkpoint.manifest.parameters.items():
        layout = Layout.flat([torch.Size(tensor.shape)], world_size)
        for rank, file in enumerate(checkpoint.files()):
            ((begin, end, _),) = layout.pieces(rank)
            assert file.range_of(name) == ((begin, end) if begin < end else (0, 0))


def test_buffers_of_each_rank_and_nothing_else_of_it(model, tmp_path):
    """Those of the same rank if there was one, else rank 0's; no random states."""
    reshard_checkpoint(model, 5, tmp_path / "out")
    checkpoint = ShardedCheckpoint(tmp_path / "out")
    values = [checkpoint.read_buffer("n", rank).tolist() for rank in range(5)]
    assert values == [[4.0, 5.0], [0.0, 0.0], [0.0, 0.0], [4.0, 5.0], [4.0, 5.0]]
    assert "rank/random" in ShardedCheckpoint(model).file(1).container.entries
    assert not any(
        key.startswith("rank/") for file in checkpoint.files() for key in file.container.entries
    )


def test_command(tmp_path, capsys):
    small_checkpoint(tmp_path / "run" / "step-00000007")
    code, out, err = run_cli(capsys, "--ckpt_prefix", tmp_path / "run", "--reshard", 4)
    assert (code, len(out)) == (0, 1)
    assert out[0].startswith(f"wrote {tmp_path}/run_of_4: 8 parameters (")
    assert verify_checkpoint(tmp_path / "run_of_4").startswith(f"verified {tmp_path}/run_of_4: ")


_CONVERTS = [("--dtype", "float16"), ("--format", "pth"), ("--max_shard_size", "5GB")]
_WRITES = [*_CONVERTS, ("--optimizer",), ("--reshard", 3), ("--tied", "a=b"), ("--save_path", "x")]


@pytest.mark.parametrize(
    "done, option",
    [("--reshard", option) for option in [*_CONVERTS, ("--optimizer",)]]
    + [("--verify", option) for option in [*_WRITES, ("--optimizer", "--dtype", "float16")]],
)
def test_options_that_do_not_fit(tmp_path, capsys, done, option):
    small_checkpoint(tmp_path / "ckpt")
    first = (done, 2) if done == "--reshard" else (done,)
    code, _, err = run_cli(capsys, "--ckpt_prefix", tmp_path / "ckpt", *first, *option)
    assert code == 2 and err[-1].startswith(f"OptionsError: {done} ")
    named = ", ".join(name for name in map(str, option) if name.startswith("--"))
    assert err[-1].endswith(f"cannot be used with {named}. Remove {named}.")


@pytest.mark.parametrize("world_size", [0, -1, 100_000, True, "2"])
def test_no_number_of_ranks(tmp_path, world_size):
    with pytest.raises(errors.OptionsError, match="expected 1 to 99999"):
        reshard_checkpoint(tmp_path, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_from_per_rank_torch_files(tmp_path, world_size):
    prefix = save(rank_files(small_model(), 4), tmp_path)
    reshard_checkpoint(prefix, world_size, tmp_path / "out", suffix=SUFFIX)
    consolidate_checkpoint(tmp_path / "out", tmp_path / "out.pth")
    assert_equal(loaded(tmp_path / "out.pth"), expected_state_dict(small_model()))


def test_values_that_are_no_tensors(tmp_path):
    """What get_extra_state returned goes along, unless only executing code could bring it back."""
    files = rank_files(small_model(), 2)
    for rank, file in enumerate(files):
        file["model"]["head._extra_state"] = {"seen": (1, 2), "rank": rank}
    reshard_checkpoint(save(files, tmp_path), 3, tmp_path / "out", suffix=SUFFIX)
    consolidate_checkpoint(tmp_path / "out", tmp_path / "out.pth")
    found = loaded(tmp_path / "out.pth")
    assert found["head._extra_state"] == {"seen": (1, 2), "rank": 0}
    for file in files:
        file["model"]["head._extra_state"] = torch.Size([3])
    with pytest.raises(errors.UnsupportedValueError, match="_extra_state"):
        reshard_checkpoint(save(files, tmp_path), 2, tmp_path / "other", suffix=SUFFIX)
