"""What does not belong together is refused by name, and nothing is written."""

import os
import pickle
import zipfile

import pytest
import torch
from test_consolidate_support import (
    SUFFIX,
    Entry,
    assert_refused,
    path_of,
    rank_files,
    save,
    small_model,
)

from xla_fsdp.consolidate import (
    CheckpointError,
    CheckpointNotFoundError,
    DuplicateRankError,
    ForeignFileError,
    InvalidMetadataError,
    MetadataMismatchError,
    MissingMetadataError,
    MissingRankError,
    ShardMismatchError,
    UnreadableFileError,
    UnsafeFileError,
    WorldSizeError,
    consolidate_sharded_state_dicts,
)

pytestmark = pytest.mark.filterwarnings("error")
WORLD_SIZES = [1, 2, 3, 4, 8]


def write(tmp_path, world_size=2, damage=None, rank=1, model=None):
    """Rank files, one of them damaged; returns the prefix."""
    files = rank_files(model or small_model(), world_size)
    if damage:
        damage(files[rank])
    return save(files, tmp_path)


def test_nothing_matches(tmp_path, capsys):
    assert_refused(capsys, tmp_path, f"{tmp_path}/no", CheckpointNotFoundError, f"{tmp_path}/no")


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize("which", ["first", "last"])
def test_missing_rank(tmp_path, capsys, world_size, which):
    prefix = write(tmp_path, world_size)
    lost = 0 if which == "first" else world_size - 1
    path_of(tmp_path, lost, world_size).unlink()
    kept = 1 if which == "first" else 0
    assert_refused(
        capsys,
        tmp_path,
        prefix,
        MissingRankError,
        path_of(tmp_path, kept, world_size),
        f"no file of rank {lost}",
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_duplicate_rank(tmp_path, capsys, world_size):
    prefix = write(tmp_path, world_size)
    copy = path_of(tmp_path, "0b", world_size)
    copy.write_bytes(path_of(tmp_path, 0, world_size).read_bytes())
    assert_refused(
        capsys,
        tmp_path,
        prefix,
        DuplicateRankError,
        copy,
        path_of(tmp_path, 0, world_size),
        "rank 0",
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_files_of_another_world(tmp_path, capsys, world_size):
    prefix = write(tmp_path, world_size)
    save(rank_files(small_model(), world_size + 1), tmp_path)
    assert_refused(
        capsys, tmp_path, prefix, WorldSizeError, f"of-{world_size}.pth", f"of-{world_size + 1}.pth"
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rank_outside_its_world(tmp_path, capsys, world_size):
    def damage(file):
        file["shard_metadata"]["rank"] = world_size

    prefix = write(tmp_path, world_size, damage, rank=0)
    assert_refused(
        capsys,
        tmp_path,
        prefix,
        WorldSizeError,
        path_of(tmp_path, 0, world_size),
        f"rank {world_size}",
    )


def test_world_size_of_state_dicts():
    files = rank_files(small_model(), 3)
    with pytest.raises(WorldSizeError, match="2 entries, but shard_metadata is for 3"):
        consolidate_sharded_state_dicts(
            [file["model"] for file in files[:2]], files[0]["shard_metadata"]
        )
    with pytest.raises(MissingRankError, match="is empty"):
        consolidate_sharded_state_dicts([], files[0]["shard_metadata"])


@pytest.mark.parametrize(
    "content",
    [
        {"epoch": 3},
        [1, 2],
        torch.zeros(3),
        {"consolidated": 1, "shard_metadata": {}},
        None,
    ],
    ids=["dict", "list", "tensor", "marker-and-metadata", "none"],
)
def test_foreign_file(tmp_path, capsys, content):
    prefix = write(tmp_path)
    foreign = path_of(tmp_path, 7, 2)
    torch.save(content, foreign)
    assert_refused(capsys, tmp_path, prefix, ForeignFileError, foreign)


def test_model_that_is_no_state_dict(tmp_path, capsys):
    prefix = write(tmp_path, damage=lambda file: file.update(model=[1]))
    assert_refused(capsys, tmp_path, prefix, ForeignFileError, path_of(tmp_path, 1, 2))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_missing_metadata(tmp_path, capsys, world_size):
    prefix = write(tmp_path, world_size, lambda file: file.pop("shard_metadata"), world_size - 1)
    assert issubclass(MissingMetadataError, ForeignFileError)
    assert_refused(
        capsys,
        tmp_path,
        prefix,
        MissingMetadataError,
        path_of(tmp_path, world_size - 1, world_size),
    )


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("size", [0, 1, 10, 1000, -1, -100])
def test_truncated(tmp_path, capsys, size):
    prefix = write(tmp_path)
    truncate(path_of(tmp_path, 1, 2), size)
    assert_refused(capsys, tmp_path, prefix, UnreadableFileError, path_of(tmp_path, 1, 2))


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello world\n",
        bytes(range(256)) * 16,
        pickle.dumps({}, 2),
        pickle.dumps({}, 4),
    ],
    ids=["text", "binary", "pickle-2", "pickle-4"],
)
def test_not_a_torch_file(tmp_path, capsys, garbage):
    prefix = write(tmp_path)
    path_of(tmp_path, 1, 2).write_bytes(garbage)
    assert_refused(capsys, tmp_path, prefix, UnreadableFileError, path_of(tmp_path, 1, 2))


def test_zip_that_torch_did_not_write(tmp_path, capsys):
    prefix = write(tmp_path)
    with zipfile.ZipFile(path_of(tmp_path, 1, 2), "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert_refused(capsys, tmp_path, prefix, UnreadableFileError, path_of(tmp_path, 1, 2))


def test_directory(tmp_path, capsys):
    prefix = write(tmp_path)
    path_of(tmp_path, 7, 2).mkdir()
    assert_refused(capsys, tmp_path, prefix, UnreadableFileError, path_of(tmp_path, 7, 2))


class Harmful:
    """Leaves a trace when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("writer", ["zip", "legacy", "pickle"])
def test_unsafe_content_is_not_executed(tmp_path, capsys, writer):
    trace = tmp_path / "executed"

    files = rank_files(small_model(), 2)
    prefix = save(files, tmp_path)
    files[1]["extra"] = Harmful(trace)
    with open(path_of(tmp_path, 1, 2), "wb") as file:
        if writer == "pickle":
            pickle.dump(files[1]["extra"], file, protocol=2)
        else:
            torch.save(files[1], file, _use_new_zipfile_serialization=writer == "zip")
    assert_refused(
        capsys, tmp_path, prefix, UnsafeFileError, path_of(tmp_path, 1, 2), "posix.mkdir"
    )
    assert not trace.exists()


def drop_key(file):
    del file["model"]["norm.weight"]


def drop_buffer(file):
    del file["model"]["norm.mean"]


def add_key(file):
    file["model"]["surplus"] = torch.zeros(2)


def longer_shard(file):
    file["model"]["norm.weight"] = torch.zeros(9)


def other_rows(file):
    file["model"]["emb.weight"] = torch.zeros(3, 4)


def other_dtype(file):
    file["model"]["norm.weight"] = file["model"]["norm.weight"].double()


def no_tensor(file):
    file["model"]["norm.weight"] = 3


def other_buffer(file):
    file["model"]["norm.mean"] = torch.zeros(4, dtype=torch.bfloat16)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "damage",
    [
        drop_key,
        drop_buffer,
        add_key,
        longer_shard,
        other_rows,
        other_dtype,
        no_tensor,
        other_buffer,
    ],
)
def test_ranks_that_hold_different_tensors(tmp_path, capsys, damage, rank):
    prefix = write(tmp_path, damage=damage, rank=rank)
    # Which of the two ranks is wrong cannot be known in general: the message names a file and key.
    key = {
        "drop_buffer": "norm.mean",
        "add_key": "surplus",
        "other_rows": "emb.weight",
        "other_buffer": "norm.mean",
    }.get(damage.__name__, "norm.weight")
    assert_refused(capsys, tmp_path, prefix, ShardMismatchError, tmp_path, ".pth: ", key)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shape", [(0,), (), (1, 1)])
def test_shards_that_do_not_hold_the_parameter(tmp_path, capsys, world_size, shape):
    files = rank_files(small_model(), world_size)
    for file in files:
        file["model"]["norm.weight"] = torch.zeros(shape)
    assert_refused(
        capsys,
        tmp_path,
        save(files, tmp_path),
        ShardMismatchError,
        path_of(tmp_path, 0, world_size),
        "norm.weight",
    )


def test_alias_of_another_shape(tmp_path, capsys):
    files = rank_files([Entry("a", "flat", [(("a", "z"), torch.zeros(4))])], 2)
    for file in files:
        file["model"]["z"] = torch.zeros(7)
    assert_refused(
        capsys, tmp_path, save(files, tmp_path), ShardMismatchError, path_of(tmp_path, 0, 2), "'z'"
    )


def other_members(meta):
    meta["parameters"]["norm.weight"]["members"][0]["shape"] = [1, 3]


def other_name(meta):
    meta["parameters"]["norm.weight"]["members"][0]["names"] = ["norm.bias"]


def other_buffer_dtype(meta):
    meta["buffers"]["norm.mean"] = "float64"


def no_buffer_dtype(meta):
    meta["buffers"].clear()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "damage",
    [
        other_members,
        other_name,
        other_buffer_dtype,
        no_buffer_dtype,
    ],
)
def test_ranks_that_describe_different_models(tmp_path, capsys, damage, rank):
    prefix = write(tmp_path, damage=lambda file: damage(file["shard_metadata"]), rank=rank)
    assert_refused(
        capsys,
        tmp_path,
        prefix,
        MetadataMismatchError,
        path_of(tmp_path, 1, 2),
        path_of(tmp_path, 0, 2),
        "norm.",
    )


def put(*path, value):
    """A damage that sets one entry of the metadata; `value` None deletes it."""

    def damage(meta):
        for step in path[:-1]:
            meta = meta[step]
        if value is None:
            del meta[path[-1]]
        else:
            meta[path[-1]] = value

    return damage


BLOCK = ("parameters", "block.flat_param_0")
DAMAGES = {
    "format": put("format", value="other"),
    "version": put("version", value=2),
    "no-version": put("version", value=None),
    "no-world-size": put("world_size", value=None),
    "no-rank": put("rank", value=None),
    "no-parameters": put("parameters", value=None),
    "no-buffers": put("buffers", value=None),
    "world-size-0": put("world_size", value=0),
    "world-size-text": put("world_size", value="2"),
    "rank-bool": put("rank", value=True),
    "rank-negative": put("rank", value=-1),
    "parameters-list": put("parameters", value=[1]),
    "parameters-int-keys": put("parameters", value={1: {}}),
    "parameter-list": put(*BLOCK, value=[1]),
    "layout-unknown": put(*BLOCK, "layout", value="columns"),
    "layout-dim0-of-several": put(*BLOCK, "layout", value="dim0"),
    "layout-dim0-of-scalar": put("parameters", "scalar", "layout", value="dim0"),
    "numel-wrong": put(*BLOCK, "numel", value=15),
    "numel-missing": put(*BLOCK, "numel", value=None),
    "members-missing": put(*BLOCK, "members", value=None),
    "members-none": put("parameters", "nothing", "members", value=[]),
    "member-int": put(*BLOCK, "members", 0, value=3),
    "member-without-name": put(*BLOCK, "members", 0, "names", value=[]),
    "member-name-int": put(*BLOCK, "members", 0, "names", value=[3]),
    "member-shape-wrong": put(*BLOCK, "members", 0, "shape", value=[3, 5]),
    "member-shape-negative": put(*BLOCK, "members", 0, "shape", value=[-3, -4]),
    "member-shape-text": put(*BLOCK, "members", 0, "shape", value="3"),
    "members-overlap": put(*BLOCK, "members", 3, "offset", value=11),
    "members-gap": put(*BLOCK, "members", 0, "offset", value=1),
    "name-twice": put(*BLOCK, "members", 1, "names", value=["block.fc.weight"]),
    "name-of-buffer": put(*BLOCK, "members", 1, "names", value=["scalar"]),
    "dtype-unknown": put("buffers", "norm.mean", value="float31"),
    "dtype-not-a-dtype": put("buffers", "norm.mean", value="nn"),
    "dtype-int": put("buffers", "norm.mean", value=4),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_metadata_that_contradicts_itself(tmp_path, capsys, damage):
    prefix = write(tmp_path, damage=lambda file: damage(file["shard_metadata"]))
    assert_refused(capsys, tmp_path, prefix, InvalidMetadataError, path_of(tmp_path, 1, 2))


@pytest.mark.parametrize("metadata", [[1], {}, {"rank": 0}, 3])
def test_metadata_of_no_known_kind(tmp_path, capsys, metadata):
    prefix = write(tmp_path, damage=lambda file: file.update(shard_metadata=metadata))
    assert_refused(capsys, tmp_path, prefix, InvalidMetadataError, path_of(tmp_path, 1, 2))


def test_described_but_not_stored_anywhere(tmp_path, capsys):
    files = rank_files(small_model(), 2)
    for file in files:
        del file["model"]["scalar"]
    assert_refused(
        capsys,
        tmp_path,
        save(files, tmp_path),
        ShardMismatchError,
        path_of(tmp_path, 0, 2),
        "'scalar' is described but not stored",
    )


def test_one_base_class():
    import xla_fsdp.consolidate as package

    errors = [getattr(package, name) for name in package.__all__ if name.endswith("Error")]
    assert len(errors) == 21
    assert all(issubclass(error, CheckpointError) for error in errors)


def test_suffix_of_the_issue():
    assert SUFFIX == "_rank-*-of-*.pth"
