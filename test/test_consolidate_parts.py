"""The parts of the streaming one by one: reading ahead, buffers, the cache, odd manifests."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from consolidating import assert_same, loaded, same
from sharded_files import small_checkpoint, write_checkpoint

from xla_fsdp.consolidate import consolidate_checkpoint, errors
from xla_fsdp.consolidate.format import manifest, rank_file
from xla_fsdp.consolidate.format.dtypes import copy_into
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint
from xla_fsdp.consolidate.stream.tensors import pump


@pytest.mark.parametrize("at", [0, 1, 50, 99])
@pytest.mark.parametrize("side", ["produce", "consume"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_pump_raises_what_either_side_raised(at, side, kind):
    taken = []

    def produce():
        for number in range(100):
            if side == "produce" and number == at:
                raise kind("here")
            yield number

    def consume(number):
        if side == "consume" and number == at:
            raise kind("here")
        taken.append(number)

    before = threading.active_count()
    with pytest.raises(kind, match="here"):
        pump(produce(), consume)
    assert threading.active_count() == before
    assert taken == list(range(at))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cast_is_that_of_torch(dtype):
    values = torch.randn(100_001) * 1e5
    values[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    out = torch.empty(100_001, dtype=dtype)
    assert same(copy_into(out, values), values.to(dtype))


@pytest.mark.parametrize("limit", [0, 1 << 21, 1 << 30])
def test_any_range_of_elements(tmp_path, monkeypatch, limit):
    """Over chunks and ranks, whatever the cache keeps."""
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


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 78), (100, 101)])
def test_elements_that_are_not_there(tmp_path, begin, end):
    write_checkpoint(tmp_path / "ckpt", {"s": torch.arange(77)})
    with pytest.raises(ValueError, match="'s' has 77 elements"):
        ShardedCheckpoint(tmp_path / "ckpt").read("s", begin, end)


def rewrite(folder, found, **changes):
    """Another manifest for the same files, with a right digest."""
    (folder / manifest.NAME).write_bytes(manifest.dump_manifest(replace(found, **changes)))


def test_single_values_that_are_none(tmp_path):
    small_checkpoint(tmp_path / "ckpt")
    found = ShardedCheckpoint(tmp_path / "ckpt").manifest
    state = found.optimizer.state
    for wrong in (5, {"on": "host"}, {"value": {"$": "code", "of": "x"}}):
        bias = replace(state["fc.bias"], single={"a": wrong})
        optimizer = replace(found.optimizer, state={**state, "fc.bias": bias})
        rewrite(tmp_path / "ckpt", found, optimizer=optimizer)
        with pytest.raises(
            errors.InvalidMetadataError, match="fc.bias.*state 'a'|state 'a' of 'fc.bias'"
        ):
            consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "o", format="pth", optimizer=True)
        assert not (tmp_path / "o").exists()


def test_a_parameter_of_a_terabyte_that_nobody_holds(tmp_path):
    small_checkpoint(tmp_path / "ckpt")
    found = ShardedCheckpoint(tmp_path / "ckpt").manifest
    bias = replace(found.parameters["fc.bias"], shape=(1 << 40,))
    rewrite(tmp_path / "ckpt", found, parameters={**found.parameters, "fc.bias": bias})
    with pytest.raises(errors.CoverageError, match="no rank has"):
        consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.pth")


def test_a_name_that_safetensors_has_for_itself(tmp_path):
    write_checkpoint(tmp_path / "ckpt", {"__metadata__": torch.ones(3), "../../x": torch.ones(2)})
    with pytest.raises(errors.UnsupportedValueError, match="use --format pth"):
        consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.safetensors")
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.pth")
    assert loaded(tmp_path / "m.pth").keys() == {"__metadata__", "../../x"}


def test_random_models(tmp_path):
    """Of many shapes, in many pieces, against the values themselves."""
    pick = np.random.default_rng(5)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
    for number in range(10):
        model = {}
        for index in range(pick.integers(1, 8)):
            shape = pick.integers(0, 40, pick.integers(0, 4)).tolist()
            dtype = dtypes[pick.integers(len(dtypes))]
            model[f"p{index}"] = (torch.randn(shape) * 9).to(dtype)
        folder = tmp_path / str(number)
        write_checkpoint(folder, model, world_size=int(pick.integers(1, 9)))
        consolidate_checkpoint(folder, f"{folder}.pth")
        assert_same(loaded(f"{folder}.pth"), model)
