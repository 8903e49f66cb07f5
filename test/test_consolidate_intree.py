"""Checkpoints written by torch_xla's own class become the plain model's state_dict."""

import os
from pathlib import Path

import pytest
import torch
from test_consolidate_intree_writer import CASES
from test_consolidate_support import assert_refused, run_cli

from xla_fsdp.consolidate import (
    InvalidMetadataError,
    ShardMismatchError,
    consolidate_checkpoint,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)

pytestmark = pytest.mark.filterwarnings("error")
TIED = {"head.weight": "emb.weight"}
LOSSY = {"tied", "tied-flat", "bfloat16-buffers-cpu"}


@pytest.fixture(scope="module")
def written(tmp_path_factory, script_server):
    directory = tmp_path_factory.mktemp("intree")
    script = Path(__file__).with_name("test_consolidate_intree_writer.py")
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = script_server.run([script, directory], cwd=directory, env=environment, timeout=1500)
    assert done.returncode == 0, done.stderr
    return directory


def load(written, case, **options):
    full, path = consolidate_sharded_model_checkpoints(
        f"{written / case}/", "rank-*-of-*.pth", save_model=False, **options
    )
    assert path is None
    return full, torch.load(written / case / "plain.pt", weights_only=True)


def contents(written, case):
    paths = sorted((written / case).glob("rank-*.pth"))
    return [torch.load(path, weights_only=True) for path in paths]


def assert_equal_models(full, plain):
    # The wrapper itself changes the order of the keys, so only the set can be compared.
    assert full.keys() == plain.keys()
    for name, tensor in plain.items():
        assert full[name].dtype == tensor.dtype, name
        assert full[name].shape == tensor.shape, name
        assert torch.equal(full[name], tensor), name


@pytest.mark.parametrize("case", sorted(CASES.keys() - LOSSY))
def test_equals_the_plain_model(written, case, tmp_path):
    """From files, streamed into a file, and from state_dicts in memory."""
    full, plain = load(written, case)
    assert_equal_models(full, plain)
    for tensor in full.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    path = tmp_path / "m.pth"
    consolidate_checkpoint(f"{written / case}/", path, suffix="rank-*-of-*.pth")
    found = torch.load(path, weights_only=True)["model"]
    assert list(found) == list(full)
    assert_equal_models(found, plain)
    files = contents(written, case)
    state_dicts, metadata = [file["model"] for file in files], files[0]["shard_metadata"]
    assert_equal_models(consolidate_sharded_state_dicts(state_dicts, metadata), plain)


def test_metadata_of_the_writer_lacks_what_the_lossy_cases_need(written):
    """If torch_xla ever records these, the reader should use them: then this test fails."""
    assert contents(written, "bfloat16-buffers-cpu")[0]["shard_metadata"]["buffer_info"] == {}
    for case in ("tied", "tied-flat"):
        assert "head" not in str(contents(written, case)[0])


def test_cast_buffers_without_recorded_dtype_are_returned_as_stored(written):
    full, plain = load(written, "bfloat16-buffers-cpu")
    assert full.keys() == plain.keys()
    assert full["block.1.running_mean"].dtype == torch.bfloat16
    assert torch.equal(full["block.1.running_mean"].float(), plain["block.1.running_mean"])


@pytest.mark.parametrize("case", ["tied", "tied-flat"])
def test_tied_names_are_lost_unless_named(written, case):
    full, plain = load(written, case)
    assert full.keys() == {"emb.weight"}
    full, plain = load(written, case, tied=TIED)
    assert_equal_models(full, plain)
    assert full["head.weight"] is full["emb.weight"]


def test_tied_names_on_the_command_line(written, tmp_path, capsys):
    arguments = (
        "--ckpt_prefix",
        f"{written / 'tied'}/",
        "--ckpt_suffix",
        "rank-*",
        "--save_path",
        tmp_path / "full.pth",
    )
    code, out, _ = run_cli(capsys, *arguments, "--tied", "head.weight=emb.weight")
    assert code == 0
    full = torch.load(tmp_path / "full.pth", weights_only=True)["model"]
    assert full.keys() == {"emb.weight", "head.weight"}
    assert "1 parameters (15 elements)" in out[-1]
    code, _, err = run_cli(capsys, *arguments, "--tied", "head.weight=nope")
    assert code == 2
    assert "no such parameter 'nope'" in err[-1]


def first_shard(file):
    return next(iter(next(iter(file["shard_metadata"]["shard_info"].values())).values()))


def first_flat(file, change):
    """Changes the names, shapes and numels of the first flat parameter."""
    flat = file["shard_metadata"]["flatten_info"]
    key = next(iter(flat))
    flat[key] = change(*flat[key])


# The error, the words, and how rank 1's file is damaged.
DAMAGES = {
    **{
        f"no {field}": (
            InvalidMetadataError,
            field,
            lambda file, field=field: file["shard_metadata"].pop(field),
        )
        for field in ("world_size", "rank", "shard_info", "flatten_info")
    },
    "missing flat parameter": (
        InvalidMetadataError,
        "",
        lambda file: file["shard_metadata"]["flatten_info"].popitem(),
    ),
    "numels": (
        InvalidMetadataError,
        "",
        lambda file: first_flat(file, lambda n, s, e: (n, s, [e[0] + 1, *e[1:]])),
    ),
    "columns": (
        InvalidMetadataError,
        "",
        lambda file: first_flat(file, lambda n, s, e: (n, s[:-1], e)),
    ),
    "size": (InvalidMetadataError, "", lambda file: first_shard(file).update(_orig_size=[1])),
    "name": (InvalidMetadataError, "", lambda file: first_shard(file).update(_orig_name=3)),
    "buffer": (
        InvalidMetadataError,
        "",
        lambda file: file["shard_metadata"]["buffer_info"].update(table={"_orig_dtype": "float32"}),
    ),
    "undescribed shard": (
        ShardMismatchError,
        "block._fsdp_shard_other",
        lambda file: file["model"].update({"block._fsdp_shard_other": torch.zeros(3)}),
    ),
}


@pytest.mark.parametrize(("error", "words", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_contradictory_metadata(written, tmp_path, capsys, error, words, damage):
    for index, file in enumerate(contents(written, "flat-2")):
        if index == 1:
            damage(file)
        torch.save(file, tmp_path / f"ckpt{index}.pth")
    mentioned = tmp_path / "ckpt1.pth", words
    assert_refused(capsys, tmp_path, f"{tmp_path}/", error, *mentioned, suffix="ckpt*.pth")


def test_suffix_and_output_of_the_huggingface_trainer(written, tmp_path):
    for rank, file in enumerate(contents(written, "flat-2")):
        torch.save(file, tmp_path / f"rank{rank}-of-2-pytorch_model.bin")
    full, path = consolidate_sharded_model_checkpoints(
        ckpt_prefix=f"{tmp_path}/", ckpt_suffix="rank*-of-*-pytorch_model.bin", save_model=False
    )
    assert path is None
    assert_equal_models(full, torch.load(written / "flat-2" / "plain.pt", weights_only=True))
