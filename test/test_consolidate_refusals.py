"""Rank files that are damaged or do not belong together raise an error, and nothing is written."""

import pickle
import zipfile

import pytest
import torch
from consolidating import Harmful, assert_refused
from per_rank_files import Entry, path_of, rank_files, save, small_model

from xla_fsdp.consolidate import consolidate_sharded_state_dicts, errors

WORLD_SIZES = [1, 2, 3, 4, 8]


def refused(capsys, folder, files, error, *mentioned):
    assert_refused(capsys, folder, save(files, folder), error, *mentioned)


def test_nothing_matches(tmp_path, capsys):
    prefix = f"{tmp_path}/no"
    assert_refused(capsys, tmp_path, prefix, errors.CheckpointNotFoundError, prefix)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sets_of_files(tmp_path, capsys, world_size):
    """A rank is missing, twice, outside of its world, of another world, or has no metadata."""
    last = path_of(tmp_path, world_size - 1, world_size)
    first, copy = path_of(tmp_path, 0, world_size), path_of(tmp_path, "0b", world_size)
    prefix = save(rank_files(small_model(), world_size), tmp_path)

    copy.write_bytes(first.read_bytes())
    assert_refused(capsys, tmp_path, prefix, errors.DuplicateRankError, copy, first, "rank 0")
    copy.unlink()
    for lost, kept in ((first, last), (last, first)) if world_size > 1 else ():
        data = lost.read_bytes()
        lost.unlink()
        number = 0 if lost == first else world_size - 1
        mentioned = (kept, f"no file of rank {number}") if world_size == 2 else (f"rank {number}",)
        assert_refused(capsys, tmp_path, prefix, errors.MissingRankError, *mentioned)
        lost.write_bytes(data)

    files = rank_files(small_model(), world_size)
    files[0]["shard_metadata"]["rank"] = world_size
    refused(capsys, tmp_path, files, errors.WorldSizeError, first, f"rank {world_size}")
    files = rank_files(small_model(), world_size)
    del files[-1]["shard_metadata"]
    refused(capsys, tmp_path, files, errors.MissingMetadataError, last)
    for shape in ((0,), (), (1, 1)):
        files = rank_files(small_model(), world_size)
        for file in files:
            file["model"]["norm.weight"] = torch.zeros(shape)
        refused(capsys, tmp_path, files, errors.ShardMismatchError, first, "norm.weight")

    save(rank_files(small_model(), world_size), tmp_path)
    save(rank_files(small_model(), world_size + 1), tmp_path)
    names = f"of-{world_size}.pth", f"of-{world_size + 1}.pth"
    assert_refused(capsys, tmp_path, prefix, errors.WorldSizeError, *names)


def test_world_size_of_state_dicts():
    files = rank_files(small_model(), 3)
    with pytest.raises(errors.WorldSizeError, match="2 entries, but shard_metadata is for 3"):
        models = [file["model"] for file in files[:2]]
        consolidate_sharded_state_dicts(models, files[0]["shard_metadata"])
    with pytest.raises(errors.MissingRankError, match="is empty"):
        consolidate_sharded_state_dicts([], files[0]["shard_metadata"])


@pytest.mark.parametrize(
    "content",
    [{"epoch": 3}, [1, 2], torch.zeros(3), {"consolidated": 1, "shard_metadata": {}}, None],
    ids=["dict", "list", "tensor", "marker-and-metadata", "none"],
)
def test_foreign_file(tmp_path, capsys, content):
    prefix, foreign = save(rank_files(small_model(), 2), tmp_path), path_of(tmp_path, 7, 2)
    torch.save(content, foreign)
    assert issubclass(errors.MissingMetadataError, errors.ForeignFileError)
    assert_refused(capsys, tmp_path, prefix, errors.ForeignFileError, foreign)


def notes_in_a_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")


def directory(path):
    path.unlink()
    path.mkdir()


UNREADABLE = {
    **{
        f"cut at {size}": lambda path, size=size: path.write_bytes(path.read_bytes()[:size])
        for size in (0, 1, 10, 1000, -1, -100)
    },
    "text": lambda path: path.write_bytes(b"hello world\n"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 16),
    "pickle-2": lambda path: path.write_bytes(pickle.dumps({}, 2)),
    "pickle-4": lambda path: path.write_bytes(pickle.dumps({}, 4)),
    "zip": notes_in_a_zip,
    "directory": directory,
}


@pytest.mark.parametrize("damage", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable(tmp_path, capsys, damage):
    prefix, path = save(rank_files(small_model(), 2), tmp_path), path_of(tmp_path, 1, 2)
    damage(path)
    assert_refused(capsys, tmp_path, prefix, errors.UnreadableFileError, path)


@pytest.mark.parametrize("writer", ["zip", "legacy", "pickle"])
def test_unsafe_content_is_not_executed(tmp_path, capsys, writer):
    trace, path = tmp_path / "executed", path_of(tmp_path, 1, 2)
    files = rank_files(small_model(), 2)
    prefix = save(files, tmp_path)
    files[1]["extra"] = Harmful(trace)
    with open(path, "wb") as file:
        if writer == "pickle":
            pickle.dump(files[1]["extra"], file, protocol=2)
        else:
            torch.save(files[1], file, _use_new_zipfile_serialization=writer == "zip")
    assert_refused(capsys, tmp_path, prefix, errors.UnsafeFileError, path, "posix.mkdir")
    assert not trace.exists()


def put(*path, value):
    """A damage that sets one entry of a rank's file; `value` None deletes it."""

    def damage(file):
        for step in path[:-1]:
            file = file[step]
        if value is None:
            del file[path[-1]]
        else:
            file[path[-1]] = value

    return damage


MEMBER = ("shard_metadata", "parameters", "norm.weight", "members", 0)
BUFFER_DTYPE = ("shard_metadata", "buffers", "norm.mean")
# What differs in one rank, and the key that the message names. Which of two ranks is wrong cannot
# be known in general.
OTHER_TENSORS = {
    "drop key": put("model", "norm.weight", value=None),
    "drop buffer": put("model", "norm.mean", value=None),
    "add key": put("model", "surplus", value=torch.zeros(2)),
    "longer shard": put("model", "norm.weight", value=torch.zeros(9)),
    "other rows": put("model", "emb.weight", value=torch.zeros(3, 4)),
    "other dtype": put("model", "norm.weight", value=torch.zeros(2, dtype=torch.float64)),
    "no tensor": put("model", "norm.weight", value=3),
    "other buffer": put("model", "norm.mean", value=torch.zeros(4, dtype=torch.bfloat16)),
}
KEYS = {"add key": "surplus", "other rows": "emb.weight"}
OTHER_MODELS = {
    "members": put(*MEMBER, "shape", value=[1, 3]),
    "name": put(*MEMBER, "names", value=["norm.bias"]),
    "buffer dtype": put(*BUFFER_DTYPE, value="float64"),
    "no buffer dtype": put(*BUFFER_DTYPE, value=None),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", [*OTHER_TENSORS, *OTHER_MODELS])
def test_ranks_that_differ(tmp_path, capsys, what, rank):
    files = rank_files(small_model(), 2)
    if what in OTHER_TENSORS:
        OTHER_TENSORS[what](files[rank])
        mentioned = tmp_path, ".pth: ", KEYS.get(what, "norm.")
        refused(capsys, tmp_path, files, errors.ShardMismatchError, *mentioned)
    else:
        OTHER_MODELS[what](files[rank])
        mentioned = path_of(tmp_path, 1, 2), path_of(tmp_path, 0, 2), "norm."
        refused(capsys, tmp_path, files, errors.MetadataMismatchError, *mentioned)


def test_parameters_that_no_rank_stores(tmp_path, capsys):
    path = path_of(tmp_path, 0, 2)
    files = rank_files([Entry("a", "flat", [(("a", "z"), torch.zeros(4))])], 2)
    for file in files:
        file["model"]["z"] = torch.zeros(7)
    refused(capsys, tmp_path, files, errors.ShardMismatchError, path, "'z'")
    files = rank_files(small_model(), 2)
    for file in files:
        del file["model"]["scalar"]
    words = "'scalar' is described but not stored"
    refused(capsys, tmp_path, files, errors.ShardMismatchError, path, words)


def about(*path, value):
    return put("shard_metadata", *path, value=value)


BLOCK = ("parameters", "block.flat_param_0")
DAMAGES = {
    "format": about("format", value="other"),
    "version": about("version", value=2),
    "no-version": about("version", value=None),
    "no-world-size": about("world_size", value=None),
    "no-rank": about("rank", value=None),
    "no-parameters": about("parameters", value=None),
    "no-buffers": about("buffers", value=None),
    "world-size-0": about("world_size", value=0),
    "rank-negative": about("rank", value=-1),
    "parameters-list": about("parameters", value=[1]),
    "parameters-int-keys": about("parameters", value={1: {}}),
    "layout-unknown": about(*BLOCK, "layout", value="columns"),
    "layout-dim0-of-several": about(*BLOCK, "layout", value="dim0"),
    "layout-dim0-of-scalar": about("parameters", "scalar", "layout", value="dim0"),
    "numel-wrong": about(*BLOCK, "numel", value=15),
    "numel-missing": about(*BLOCK, "numel", value=None),
    "members-missing": about(*BLOCK, "members", value=None),
    "members-none": about("parameters", "nothing", "members", value=[]),
    "member-without-name": about(*BLOCK, "members", 0, "names", value=[]),
    "member-name-int": about(*BLOCK, "members", 0, "names", value=[3]),
    "member-shape-wrong": about(*BLOCK, "members", 0, "shape", value=[3, 5]),
    "members-overlap": about(*BLOCK, "members", 3, "offset", value=11),
    "members-gap": about(*BLOCK, "members", 0, "offset", value=1),
    "name-twice": about(*BLOCK, "members", 1, "names", value=["block.fc.weight"]),
    "name-of-buffer": about(*BLOCK, "members", 1, "names", value=["scalar"]),
    "dtype-unknown": about("buffers", "norm.mean", value="float31"),
    "dtype-not-a-dtype": about("buffers", "norm.mean", value="nn"),
    "metadata-list": put("shard_metadata", value=[1]),
    "metadata-empty": put("shard_metadata", value={}),
    "metadata-rank": put("shard_metadata", value={"rank": 0}),
    "metadata-3": put("shard_metadata", value=3),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_metadata_that_contradicts_itself(tmp_path, capsys, damage):
    files = rank_files(small_model(), 2)
    damage(files[1])
    refused(capsys, tmp_path, files, errors.InvalidMetadataError, path_of(tmp_path, 1, 2))


def test_model_that_is_no_state_dict(tmp_path, capsys):
    files = rank_files(small_model(), 2)
    files[1]["model"] = [1]
    refused(capsys, tmp_path, files, errors.ForeignFileError, path_of(tmp_path, 1, 2))
