"""Checkpoint folders consolidated, with every option, and cut anew for other numbers of ranks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import forged
from consolidating import (
    SUFFIX,
    assert_equal,
    expected_state_dict,
    loaded,
    rank_files,
    run_cli,
    same,
    save,
    small_model,
)
from on_ranks import raises
from safetensors import safe_open
from safetensors.torch import load_file
from sharded_files import everything, small_checkpoint, write_checkpoint

from xla_fsdp.consolidate import (
    consolidate_checkpoint,
    errors,
    reshard_checkpoint,
    verify_checkpoint,
)
from xla_fsdp.consolidate.format import rank_file
from xla_fsdp.consolidate.format.dtypes import copy_into
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint
from xla_fsdp.consolidate.stream.options import parse_size
from xla_fsdp.sharding.layout import Layout


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def untied(model):
    return {name: tensor for name, tensor in model.items() if name != "head.weight"}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_one_safetensors_file(tmp_path, world_size):
    model, _ = small_checkpoint(tmp_path / "ckpt", world_size)
    result = consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "model.safetensors")
    assert_equal(load_file(result.path), untied(model))
    metadata = metadata_of(result.path)
    assert metadata["format"] == "pt"
    assert json.loads(metadata["tied"]) == {"head.weight": "emb.weight"}
    assert json.loads(metadata["consolidated"])["step"] == 7
    assert (result.parameters, result.world_size) == (8, world_size)
    assert result.bytes == Path(result.path).stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "model.safetensors"]


@pytest.mark.parametrize("mmap", [False, True])
def test_one_torch_file(tmp_path, mmap):
    model, _ = small_checkpoint(tmp_path / "ckpt")
    result = consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "model.pth")
    content = torch.load(result.path, weights_only=True, mmap=mmap)
    assert list(content["model"]) == list(model)
    assert_equal(content["model"], model)
    assert content["model"]["emb.weight"] is content["model"]["head.weight"]
    assert content["consolidated"]["step"] == 7
    for tensor in content["model"].values():
        assert tensor.is_contiguous() and not tensor.requires_grad
        assert not mmap or not tensor.numel() or tensor.data_ptr() % 64 == 0
    torch.save(content, tmp_path / "again.pth")
    assert_equal(loaded(tmp_path / "again.pth"), model)


@pytest.mark.parametrize("size", ["1B", "2KB", "4KiB", "10KB"])
def test_max_shard_size(tmp_path, size):
    model, _ = small_checkpoint(tmp_path / "ckpt")
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "out", max_shard_size=size)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["tied"] == {"head.weight": "emb.weight"}
    stored = untied(model)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    found, names = {}, sorted(set(index["weight_map"].values()))
    for number, name in enumerate(names, 1):
        assert name == f"model-{number:05d}-of-{len(names):05d}.safetensors"
        part = load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][key] == name for key in part)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= parse_size(size)
        found |= part
    assert_equal(found, stored)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("2GiB", 2**31), ("500mb", 5 * 10**8), ("1.5KB", 1500), (7, 7), ("8", 8)]
    + [(text, None) for text in ("", "GB", "-5GB", "5 parsecs", "0", "nan", "1e9", "0.1B")],
)
def test_sizes(text, size):
    if size is not None:
        assert parse_size(text) == size
        return
    raises(errors.OptionsError, "max_shard_size: .*like 5GB", parse_size, text)


def test_optimizer_as_torch_file(tmp_path):
    model, optimizer = small_checkpoint(tmp_path / "ckpt")
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "out", optimizer=True, format="pth")
    found = torch.load(tmp_path / "out" / "optimizer.pth", weights_only=True, mmap=True)
    assert found["param_groups"] == optimizer["param_groups"]
    assert found["state"].keys() == optimizer["state"].keys()
    for name, state in optimizer["state"].items():
        assert found["state"][name].pop("note", None) == state.pop("note", None)
        assert_equal(found["state"][name], state)
    assert_equal(loaded(tmp_path / "out" / "model.pth"), model)


def test_optimizer_as_safetensors(tmp_path):
    _, optimizer = small_checkpoint(tmp_path / "ckpt")
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "out", optimizer=True)
    assert_equal(
        load_file(tmp_path / "out" / "optimizer.safetensors"),
        {
            f"{key}/{name}": state[key]
            for name, state in optimizer["state"].items()
            for key in ("exp_avg", "exp_avg_sq")
        },
    )
    rest = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert [group["parameters"] for group in rest["groups"]] == [
        group["params"] for group in optimizer["param_groups"]
    ]
    assert rest["groups"][1]["options"]["lr"] == 0.2
    assert rest["single"]["fc.bias"].keys() == {"step", "note"}
    assert rest["single"]["fc.bias"]["step"]["on"] == "host"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("format", ["safetensors", "pth"])
def test_dtype(tmp_path, dtype, format):
    model, _ = small_checkpoint(tmp_path / "ckpt")
    path = tmp_path / f"model.{format}"
    consolidate_checkpoint(tmp_path / "ckpt", path, dtype=dtype)
    expected = {
        name: tensor.to(getattr(torch, dtype))
        if tensor.is_floating_point() and not name.startswith("norm.")
        else tensor
        for name, tensor in model.items()
    }
    if format == "pth":
        assert_equal(loaded(path), expected)
    else:
        assert_equal(load_file(path), untied(expected))


def test_extra_state(tmp_path):
    extra = {"head._extra_state": {"$": "tuple", "of": [1, "b"]}}
    small_checkpoint(tmp_path / "ckpt", extra_state=extra)
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.pth")
    assert loaded(tmp_path / "m.pth")["head._extra_state"] == (1, "b")
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.safetensors")
    assert json.loads(metadata_of(tmp_path / "m.safetensors")["extra_state"]) == extra


def test_default_places(tmp_path):
    small_checkpoint(tmp_path / "ckpt")
    for options, name in [
        ({}, "ckpt_consolidated.safetensors"),
        ({"format": "pth"}, "ckpt_consolidated.pth"),
        ({"optimizer": True}, "ckpt_consolidated"),
        ({"max_shard_size": "5GB"}, "ckpt_consolidated"),
    ]:
        result = consolidate_checkpoint(f"{tmp_path}/ckpt/", **options)
        assert result.path == str(tmp_path / name)
    assert sorted(path.name for path in (tmp_path / "ckpt_consolidated").iterdir()) == [
        "consolidated.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save_path": "m.pth", "format": "safetensors"}, "not of --format safetensors"),
        ({"save_path": "m.pth", "optimizer": True}, "Pass a folder instead"),
        ({"save_path": "m.safetensors", "max_shard_size": "5GB"}, "Pass a folder instead"),
        ({"save_path": "m", "format": "pth", "max_shard_size": "5GB"}, "Pass --format safe"),
        ({"save_path": "m", "dtype": "int8"}, "expected one of bfloat16"),
        ({"save_path": "m", "format": "onnx"}, "expected one of"),
        ({"save_path": "m", "tied": {"a": "b"}}, "Remove --tied"),
        ({"path": "bare", "save_path": "m", "optimizer": True}, "has no optimizer"),
    ],
)
def test_options_that_do_not_fit(tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    small_checkpoint(tmp_path / "ckpt")
    write_checkpoint(tmp_path / "bare", {"w": torch.ones(3)})
    raises(errors.OptionsError, said, consolidate_checkpoint, **{"path": "ckpt", **options})
    assert {path.name for path in tmp_path.iterdir()} == {"bare", "ckpt"}


def test_damage_is_found_and_nothing_written(tmp_path, capsys):
    small_checkpoint(tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "rank-00001-of-00003.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-3] + bytes([data[-3] ^ 16]) + data[-2:])
    raises(errors.CorruptFileError, str(file), verify_checkpoint, tmp_path / "ckpt")
    for arguments in (["--verify"], ["--format", "pth"], [], ["--reshard", "2"]):
        code, out, err = run_cli(capsys, "--ckpt_prefix", tmp_path / "ckpt", *arguments)
        assert (code, out) == (2, [])
        assert err[-1].startswith(f"CorruptFileError: {file}")
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_what_the_command_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, _ = small_checkpoint(tmp_path / "ckpt")
    command = "--ckpt_prefix", "ckpt", "--save_path", "m.safetensors"
    code, out, err = run_cli(capsys, *command)
    size = (tmp_path / "m.safetensors").stat().st_size
    elements = sum(t.numel() for n, t in untied(model).items() if not n.startswith("norm."))
    said = f"wrote m.safetensors: 8 parameters ({elements} elements), {size} bytes"
    assert (code, out) == (0, [said])
    assert err == ["found step 7 of 3 ranks in ckpt", "assembled 8 parameters"]
    assert run_cli(capsys, *command)[:2] == (0, ["up to date: m.safetensors"])
    _, out, err = run_cli(capsys, "--ckpt_prefix", "ckpt", "--format", "pth", "--progress")
    assert any("write: 100%" in line for line in err) and len(out) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cast_is_that_of_torch(dtype):
    values = torch.randn(100_001) * 1e5
    values[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    out = torch.empty(100_001, dtype=dtype)
    assert same(copy_into(out, values), values.to(dtype))


@pytest.mark.parametrize("limit", [0, 1 << 21, 1 << 30])
def test_any_range_of_elements(tmp_path, monkeypatch, limit):
    values = torch.arange(1_500_000, dtype=torch.float32)
    small = torch.arange(77, dtype=torch.int32)
    write_checkpoint(tmp_path / "ckpt", {"v": values, "s": small}, world_size=3)
    monkeypatch.setattr(rank_file, "_CACHED_BYTES", limit)
    checkpoint = ShardedCheckpoint(tmp_path / "ckpt")
    pick = np.random.default_rng(0)
    for _ in range(60):
        begin, end = sorted(pick.integers(0, len(values) + 1, 2).tolist())
        assert same(checkpoint.read("v", begin, end), values[begin:end])
        begin, end = sorted(pick.integers(0, 78, 2).tolist())
        assert same(checkpoint.read("s", begin, end), small[begin:end])
    for begin, end in [(-1, 2), (3, 2), (0, 78), (100, 101)]:
        raises(ValueError, "'s' has 77 elements", checkpoint.read, "s", begin, end)


def test_a_single_value_that_is_none(tmp_path):
    small_checkpoint(tmp_path / "ckpt")
    with forged(tmp_path / "ckpt") as body:
        single = body["optimizer"]["state"]["fc.bias"]["single"]
        single["a"] = {"value": {"$": "code", "of": "x"}}
    words = "state 'a' of 'fc.bias'"
    with pytest.raises(errors.InvalidMetadataError, match=words):
        consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "o", format="pth", optimizer=True)
    assert not (tmp_path / "o").exists()


def test_a_name_that_safetensors_has_for_itself(tmp_path):
    write_checkpoint(tmp_path / "ckpt", {"__metadata__": torch.ones(3), "../../x": torch.ones(2)})
    with pytest.raises(errors.UnsupportedValueError, match="use --format pth"):
        consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.safetensors")
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.pth")
    assert loaded(tmp_path / "m.pth").keys() == {"__metadata__", "../../x"}


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
    fresh = ShardedCheckpoint(tmp_path / "out")
    fresh.read(next(name for name, each in fresh.manifest.parameters.items() if each.numel), 0, 1)
    assert len(fresh._files) == 1


def test_buffers_of_each_rank_and_nothing_else_of_it(model, tmp_path):
    """Those of the same rank if there was one, else rank 0's; no random states."""
    reshard_checkpoint(model, 5, tmp_path / "out")
    checkpoint = ShardedCheckpoint(tmp_path / "out")
    values = [checkpoint.read_buffer("n", 0, 2, rank).tolist() for rank in range(5)]
    assert values == [[4.0, 5.0], [0.0, 0.0], [0.0, 0.0], [4.0, 5.0], [4.0, 5.0]]
    assert "rank/random" in ShardedCheckpoint(model).file(1).container.entries
    assert not any(
        key.startswith("rank/") for file in checkpoint.files() for key in file.container.entries
    )


def test_reshard_by_the_command(tmp_path, capsys):
    small_checkpoint(tmp_path / "run" / "step-00000007")
    code, out, err = run_cli(capsys, "--ckpt_prefix", tmp_path / "run", "--reshard", 4)
    assert (code, len(out)) == (0, 1)
    assert out[0].startswith(f"wrote {tmp_path}/run_of_4: 8 parameters (")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run_cli(capsys, "--ckpt_prefix", tmp_path / "run_of_4", "--verify")
    said = f"verified {tmp_path}/run_of_4: step 7, 4 ranks, digests, 8 parameters, "
    assert (code, err) == (0, []) and out[0].startswith(said)
    assert sorted(tmp_path.rglob("*")) == before


_CONVERTS = "--dtype float16 --format pth --max_shard_size 5GB --optimizer"


@pytest.mark.parametrize(
    "done, others",
    [
        ("--reshard 2", _CONVERTS),
        ("--verify", f"{_CONVERTS} --reshard 3 --tied a=b --save_path x"),
    ],
)
def test_options_of_the_command_that_do_not_fit(tmp_path, capsys, done, others):
    small_checkpoint(tmp_path / "ckpt")
    options = f"{done} {others}".split()
    code, _, err = run_cli(capsys, "--ckpt_prefix", tmp_path / "ckpt", *options)
    assert code == 2 and err[-1].startswith(f"OptionsError: {options[0]} ")
    named = err[-1].partition("cannot be used with ")[2].rstrip(".").split(". Remove ")
    expected = {option for option in others.split() if option.startswith("--")}
    assert [set(each.split(", ")) for each in named] == [expected] * 2


@pytest.mark.parametrize(
    "options, said",
    [
        ("--reshard 2 --save_path {}/step-00000008", "of step 7.* Call it step-00000007, or"),
        ("--tied a=b --tied a=c", "--tied says that 'a' is 'b' and 'c'. Remove one of them"),
    ],
)
def test_options_of_the_command_that_contradict(tmp_path, capsys, options, said):
    small_checkpoint(tmp_path / "step-00000007")
    given = "--ckpt_prefix", tmp_path, *options.format(tmp_path).split()
    code, _, err = run_cli(capsys, *given)
    assert code == 2 and re.search(f"^OptionsError: .*{said}", err[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


@pytest.mark.parametrize("world_size", [0, -1, 100_000, True, "2"])
def test_no_number_of_ranks(tmp_path, world_size):
    raises(errors.OptionsError, "expected 1 to 99999", reshard_checkpoint, tmp_path, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_from_per_rank_torch_files(tmp_path, world_size):
    """What get_extra_state returned goes along, unless only executing code could bring it back."""
    files = rank_files(small_model(), 2)
    for rank, file in enumerate(files):
        file["model"]["head._extra_state"] = {"seen": (1, 2), "rank": rank}
    reshard_checkpoint(save(files, tmp_path), world_size, tmp_path / "out", suffix=SUFFIX)
    consolidate_checkpoint(tmp_path / "out", tmp_path / "out.pth")
    found = loaded(tmp_path / "out.pth")
    assert found.pop("head._extra_state") == {"seen": (1, 2), "rank": 0}
    assert_equal(found, expected_state_dict(small_model()))
    for file in files:
        file["model"]["head._extra_state"] = torch.Size([3])
    with pytest.raises(errors.UnsupportedValueError, match="_extra_state"):
        reshard_checkpoint(save(files, tmp_path), 2, tmp_path / "other", suffix=SUFFIX)
