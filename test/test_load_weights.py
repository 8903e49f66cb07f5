"""Plain weights from files into sharded models."""

import json
import os

import fsspec
import pytest
import torch
from consolidating import Harmful
from safetensors.torch import save_file
from sharded_files import small_checkpoint
from wrappings import assert_equal, plain_zoo, stacked, zoo

from xla_fsdp import full_state_dict, load_weights
from xla_fsdp.checkpoint.inventory import make_inventory
from xla_fsdp.checkpoint.matching import match_model
from xla_fsdp.checkpoint.value_loading import load_model_values
from xla_fsdp.checkpoint.weights import _open_file
from xla_fsdp.consolidate.format.local import LocalStore

RANKS = 3


def weights(seed=9):
    """A state dict, without second names of tied parameters."""
    state = plain_zoo(seed).state_dict()
    return {n: v.clone() for n, v in state.items() if n not in ("head.weight", AGAIN)}


AGAIN = "blocks.0.again.weight"


def hub_folder(folder, state, pattern="model-{}-of-3.safetensors", save=save_file):
    os.makedirs(folder)
    names = list(state)
    where = {name: pattern.format(1 + number % 3) for number, name in enumerate(names)}
    for file in set(where.values()):
        save({n: state[n] for n in names if where[n] == file}, os.path.join(folder, file))
    index = "model.safetensors" if pattern.endswith("safetensors") else "pytorch_model.bin"
    with open(os.path.join(folder, f"{index}.index.json"), "w") as out:
        json.dump({"metadata": {"total_size": 1}, "weight_map": where}, out)
    return folder


def hub_cache(folder, source):
    """Files of the hub's cache are links to blobs without an ending."""
    os.makedirs(os.path.join(folder, "blobs"))
    for number, name in enumerate(os.listdir(source)):
        blob = os.path.join(folder, "blobs", str(number))
        os.rename(os.path.join(source, name), blob)
        os.symlink(blob, os.path.join(source, name))
    return source


def makes(tmp_path):
    state = weights()
    save_file(state, tmp_path / "model.safetensors")
    for folder, name in (("one", "model"), ("odd", "zoo")):
        (tmp_path / folder).mkdir()
        save_file(state, tmp_path / folder / f"{name}.safetensors")
    small_checkpoint(tmp_path / "odd" / "step-00000007")  # of the same run
    torch.save(plain_zoo(9).state_dict(), tmp_path / "plain.pth")
    torch.save({"model": state, "epoch": 3}, tmp_path / "inside.pth")
    torch.save({"state_dict": state}, tmp_path / "old.bin")
    hub = hub_folder(tmp_path / "hub", state)
    return [
        tmp_path / "model.safetensors",
        tmp_path / "one",
        tmp_path / "odd",
        tmp_path / "plain.pth",
        tmp_path / "inside.pth",
        tmp_path / "old.bin",
        hub_cache(tmp_path / "cache", hub),
        hub / "model.safetensors.index.json",
        hub_folder(tmp_path / "bins", state, "pytorch_model-{}-of-3.bin", torch.save),
    ]


def load_all(rank, paths):
    kinds = ["nested", "flat", "dim0", "none", "root"]
    for number, path in enumerate(paths):
        model = zoo(kinds[number % len(kinds)])
        assert load_weights(model, path) == ([], [])
        assert_equal(full_state_dict(model, rank0_only=False), plain_zoo(9).state_dict())
    counted = []

    class Counting(LocalStore):
        def read_into(self, path, begin, out):
            counted.append(len(out))
            super().read_into(path, begin, out)

    inventory = make_inventory(zoo("flat"))
    tensors = _open_file(Counting(), str(paths[0]))
    match = match_model(inventory, tensors, "counted")
    counted.clear()
    load_model_values(inventory, match)
    assert sum(counted) == 4 * sum(held.length for held in inventory.parameters)


def named_otherwise(rank, folder):
    model = zoo("nested")
    keys = load_weights(
        model,
        folder / "inner.safetensors",
        prefix="net.",
        rename=lambda name: None if name == "junk" else name.replace("layers.", "blocks."),
    )
    assert keys == ([], [])
    rounded = {n: v.bfloat16().float() for n, v in plain_zoo(9).state_dict().items()}
    assert_equal(full_state_dict(model, rank0_only=False), rounded)
    stack = stacked("scan")
    expected = stacked("plain", 9).state_dict()
    keys = load_weights(stack, folder / "stack.safetensors", strict=False)
    assert keys == ([], ["more"])
    assert_equal(full_state_dict(stack, rank0_only=False), expected)
    remote = zoo("dim0")
    load_weights(remote, "memory://weights/zoo")
    assert_equal(full_state_dict(remote, rank0_only=False), plain_zoo(9).state_dict())


def spoilt(tmp_path):
    state = weights()
    good = (tmp_path / "model.safetensors").read_bytes()
    cases = []

    def case(kind, text, name, value=None):
        """Writes ``value`` as the name says, tensors beside those of the model, bytes as they are;
        None: what is there."""
        path = tmp_path / name
        if isinstance(value, bytes):
            path.write_bytes(value)
        elif path.suffix == ".safetensors" and value is not None:
            save_file({n: v for n, v in {**state, **value}.items() if v is not None}, path)
        elif value is not None:
            torch.save(value, path)
        cases.append((str(path), kind, text))

    mismatch, foreign, unsafe = "ModelMismatchError", "ForeignFileError", "UnsafeFileError"
    unreadable, not_found = "UnreadableFileError", "CheckpointNotFoundError"
    case(mismatch, "lacks 'position'", "missing.safetensors", {"position": None})
    case(mismatch, "has 'more', unknown", "more.safetensors", {"more": torch.ones(1)})
    shape = {"position": torch.ones(5)}
    case(mismatch, "size mismatch for position", "shape.safetensors", shape)
    whole = {"position": torch.ones(5, 12, dtype=torch.int64)}
    case(mismatch, "'position' is torch.int64", "whole.safetensors", whole)
    twice = {AGAIN: state["blocks.0.up.weight"] + 1}
    case(f"{mismatch}|OtherRankError", "different values", "tied.safetensors", twice)
    case(unreadable, "truncated", "short.safetensors", good[:-1])
    case(unreadable, "cannot be read|truncated", "junk.pth", b"x" * 99)
    case(foreign, "expected a state dict", "list.pth", [1])
    case(foreign, "not the name of a dense tensor", "epoch.pth", {"epoch": 1})
    case(foreign, "one rank", "rank.pth", {"model": state, "shard_metadata": {}})
    case(unsafe, "nothing was executed", "canary.pth", {"a": Harmful(tmp_path / "executed")})
    small_checkpoint(tmp_path / "saves" / "step-00000007")
    one = "saves/step-00000007/rank-00000-of-00003.safetensors"
    for name in ("saves", "saves/step-00000007", one):
        case(foreign, "Load it with load_checkpoint", name)
    cases.append(("memory://weights/no", not_found, "memory://weights/no: does not exist"))
    case(not_found, "has none of", "empty")
    (tmp_path / "empty").mkdir()
    case(f"{unreadable}|{not_found}", "exist|No such", "no.safetensors")
    case(not_found, "does not exist", "no.pth")
    for kind, text, name, weight_map in (
        ("InvalidMetadataError", "weight_map", "noindex", [1]),
        (unsafe, "only plain names", "outside", {"position": "../model.safetensors"}),
        (foreign, "lacks 'nothing'", "lacking", {"nothing": "a.safetensors"}),
        (foreign, "does not list", "partial", {"position": "a.safetensors"}),
        (f"{unreadable}|{not_found}", "b.safetensors", "absent", {"position": "b.safetensors"}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(good)
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
        case(kind, text, name)
    return cases


def refuse_all(rank, folder, cases):
    model = zoo("nested")
    for path, kinds, text in cases:
        with pytest.raises(Exception, match=text) as caught:
            load_weights(model, path)
        assert caught.type.__name__ in kinds.split("|"), (path, caught.type)
    good, empty = folder / "model.safetensors", folder / "empty"
    with pytest.raises(Exception, match="no folder|none of|rank 1 could not") as caught:
        load_weights(model, empty if rank == 1 else good)
    assert caught.type.__name__ == ("CheckpointNotFoundError" if rank == 1 else "OtherRankError")
    with pytest.raises(Exception, match="no name is left"):
        load_weights(model, good, prefix="backbone.")
    with pytest.raises(Exception, match="two tensors are named 'x'"):
        load_weights(model, good, rename=lambda name: "x")
    with pytest.raises(Exception, match="cast=True converts it"):
        load_weights(model, folder / "half.safetensors", cast=False)
    assert_equal(full_state_dict(model, rank0_only=False), plain_zoo().state_dict())


def test_every_kind_of_file_loads_and_what_is_wrong_is_refused(run_ranks, tmp_path):
    paths = makes(tmp_path)
    half = {n: v.bfloat16() for n, v in weights().items()}
    save_file(half, tmp_path / "half.safetensors")
    inner = {f"net.{n.replace('blocks.', 'layers.')}": v for n, v in half.items()}
    inner |= {"net.junk": torch.ones(1), "classifier": torch.ones(2)}
    save_file(inner, tmp_path / "inner.safetensors")
    stack = {n: v.clone() for n, v in stacked("plain", 9).state_dict().items()}
    save_file({**stack, "more": torch.ones(1)}, tmp_path / "stack.safetensors")
    cases = spoilt(tmp_path)
    remote = (tmp_path / "model.safetensors").read_bytes()

    def run(rank):
        load_all(rank, paths)
        fsspec.filesystem("memory").pipe("/weights/zoo/model.safetensors", remote)
        named_otherwise(rank, tmp_path)
        refuse_all(rank, tmp_path, cases)

    run_ranks(run, RANKS)
    assert not (tmp_path / "executed").exists()
