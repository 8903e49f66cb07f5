"""Per-rank files and the command: which are read, which raise, what is written and printed."""

import os
import pickle
import shutil
import stat
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from consolidating import (
    SUFFIX,
    Entry,
    Harmful,
    assert_refused,
    assert_same,
    expected_state_dict,
    loaded,
    path_of,
    rank_files,
    run_cli,
    save,
    small_model,
)
from processes import run_command
from sharded_files import even_cuts, write_checkpoint

from xla_fsdp.consolidate import __main__ as cli
from xla_fsdp.consolidate import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    errors,
)


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
def test_second_run_ignores_the_output_of_the_first(tmp_path, capsys, save_name):
    prefix = write(tmp_path)
    save_path = str(tmp_path / save_name) if save_name else ""
    for _ in range(2):  # the default suffix *.pth matches the output
        full, path = consolidate_sharded_model_checkpoints(prefix, save_path=save_path)
        assert_same(full, expected_state_dict(small_model()))
        assert os.path.dirname(path) == str(tmp_path)
    for rank in range(2):
        path_of(tmp_path, rank, 2).unlink()
    assert_refused(capsys, tmp_path, prefix, errors.MissingRankError, path, suffix="*.pth")


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


def test_command_of_the_readme(tmp_path):
    prefix = write(tmp_path, 4)
    target = tmp_path / "full.pth"
    options = "--ckpt_prefix", prefix, "--ckpt_suffix", SUFFIX, "--save_path", target
    command = sys.executable, "-W", "error", "-m", "xla_fsdp.consolidate"
    done = run_command(*command, *options, cwd=ROOT)
    # 9 parameters: the tied ones are counted once. 15 + 16 + 3 + 4 + 0 + 1 elements.
    size = target.stat().st_size
    assert done.stdout == f"wrote {target}: 9 parameters (39 elements), {size} bytes\n"
    found = f"found 4 rank files matching {prefix}{SUFFIX}"
    assert done.stderr.splitlines() == [found, "assembled 9 parameters"]
    assert_same(loaded(target), expected_state_dict(small_model()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: --ckpt_prefix"),
        (["--ckpt_pre", "p"], "unrecognized arguments: --ckpt_pre"),
        *((["--ckpt_prefix", "p", "--tied", text], "--tied") for text in ("a", "=a")),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    said = capsys.readouterr()
    assert (exit_.value.code, said.out) == (2, "") and "usage:" in said.err and words in said.err


@pytest.mark.parametrize(
    ("path", "words"),
    [("", "two\\nlines.pth")]
    + [(path, "OptionsError: path ") for path in ("unknown://bucket/run", "file://run")],
)
def test_message_is_one_line(tmp_path, capsys, path, words):
    (tmp_path / "two\nlines.pth").write_bytes(b"")
    code, out, err = run_cli(capsys, "--ckpt_prefix", path or f"{tmp_path}/")
    assert (code, out, len(err)) == (2, [], 1)
    assert words in err[0] and path in err[0]


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupt)
    code, out, err = run_cli(capsys, "--ckpt_prefix", "p")
    assert (code, out, err) == (130, [], ["interrupted, nothing written"])


def test_import_does_not_start_torch_xla():
    script = "import sys, xla_fsdp.consolidate; print('torch_xla' in sys.modules)"
    # torch itself may import any installed backend; the user decides that.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run_command(sys.executable, "-c", script, cwd=ROOT, env=environment)
    assert done.stdout == "False\n"


MIB = 1 << 20
# malloc returns freed pieces to the system at once. By default it keeps them, for each thread up to
# 64 MiB, and how many threads share them depends on the number of cores.
SETTINGS = {
    "PYTHONPATH": str(ROOT),
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
}
MEASURE = """
import gc, re, sys, threading, time
from xla_fsdp.consolidate import consolidate_checkpoint, consolidate_sharded_model_checkpoints
from xla_fsdp.consolidate import reshard_checkpoint, verify_checkpoint

def resident(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

folder, suffix = sys.argv[1], "_rank-*-of-*.pth"
gc.disable()  # what a call used is freed when it returns, not at some time later
open("/proc/self/clear_refs", "w").write("5")  # the peak so far was the imports'
before = resident("VmRSS")
verify_checkpoint(folder + "/ckpt")
consolidate_checkpoint(folder + "/ckpt", folder + "/out", optimizer=True, max_shard_size="100MB")
consolidate_checkpoint(folder + "/ckpt", folder + "/half.pth", dtype="bfloat16")
reshard_checkpoint(folder + "/ckpt", 3, folder + "/ranks")
consolidate_checkpoint(folder + "/legacy", folder + "/legacy.pth", suffix=suffix)
streamed = resident("VmHWM") - before

# Memory of the process itself, without mapped files, which the kernel can drop at any time.
peak = before = resident("RssAnon")
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, resident("RssAnon"))
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
consolidate_sharded_model_checkpoints(folder + "/legacy", suffix)
done = True
thread.join()
print(streamed, peak - before)
"""


@pytest.fixture
def folder(tmp_path):
    """In memory if there is room: the disk is not what is tested here."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shutil.disk_usage(shared).free < 4 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as made:
        yield Path(made)


@pytest.mark.slow
def test_memory(folder):
    """600 MiB of model and Adam state; the largest parameter alone has 160 MiB."""
    tensors = {"large": torch.ones(40 * MIB), "small": torch.ones(10 * MIB)}
    state = {name: {"m": value, "v": value} for name, value in tensors.items()}
    optimizer = {"groups": [{"params": list(tensors)}], "state": state}
    write_checkpoint(folder / "ckpt", tensors, optimizer, 4, cut=even_cuts)
    model = [Entry(name, "flat", [((name,), tensor)]) for name, tensor in tensors.items()]
    files = rank_files(model, 2)
    for file in files:
        file["optimizer"] = {name: shard * 2 for name, shard in file["model"].items()}
    save(files, folder, "legacy")
    del tensors, state, optimizer, model, files, file
    done = run_command(sys.executable, "-c", MEASURE, folder, env={**os.environ, **SETTINGS})
    streamed, in_memory = map(int, done.stdout.split())
    assert streamed < 64 * MIB
    # The function that returns the model takes its 200 MiB, and not the optimizer's.
    assert 200 * MIB <= in_memory < 216 * MIB


def refused(capsys, folder, files, error, *mentioned):
    assert_refused(capsys, folder, save(files, folder), error, *mentioned)


def test_nothing_matches(tmp_path, capsys):
    prefix = f"{tmp_path}/no"
    assert_refused(capsys, tmp_path, prefix, errors.CheckpointNotFoundError, prefix)


@pytest.mark.parametrize("world_size", [1, 2, 3])
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
        words = f"there is no file of rank {number}. Copy the files of all ranks."
        mentioned = (kept, words) if world_size == 2 else (words,)
        assert_refused(capsys, tmp_path, prefix, errors.MissingRankError, *mentioned)
        lost.write_bytes(data)

    files = rank_files(small_model(), world_size)
    files[0]["shard_metadata"]["rank"] = world_size
    refused(capsys, tmp_path, files, errors.WorldSizeError, first, f"rank {world_size}")
    files = rank_files(small_model(), world_size)
    files[-1].pop("shard_metadata")
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
    [
        {"epoch": 3},
        [1, 2],
        {"consolidated": 1, "shard_metadata": {}},
        {"model": [1], "shard_metadata": {}},
    ],
    ids=["dict", "list", "marker-and-metadata", "no-state-dict"],
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
        for size in (0, 1000, -1)
    },
    "text": lambda path: path.write_bytes(b"hello world\n"),
    "pickle-2": lambda path: path.write_bytes(pickle.dumps({}, 2)),
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


def put(file, *path):
    """Sets an entry, at all of ``path`` but the last, to that; None deletes it."""
    *steps, key, value = path
    for step in steps:
        file = file[step]
    if value is None:
        del file[key]
    else:
        file[key] = value


MEMBER = ("shard_metadata", "parameters", "norm.weight", "members", 0)
BUFFER_DTYPE = ("shard_metadata", "buffers", "norm.mean")
# What differs in one rank, and the key that the message names. Which of two ranks is wrong cannot
# be known in general.
OTHER_TENSORS = {
    "drop key": ("model", "norm.weight", None),
    "drop buffer": ("model", "norm.mean", None),
    "longer shard": ("model", "norm.weight", torch.zeros(9)),
    "other dtype": ("model", "norm.weight", torch.zeros(2, dtype=torch.float64)),
    "no tensor": ("model", "norm.weight", 3),
}
OTHER_MODELS = {
    "name": (*MEMBER, "names", ["norm.bias"]),
    "buffer dtype": (*BUFFER_DTYPE, "float64"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", [*OTHER_TENSORS, *OTHER_MODELS])
def test_ranks_that_differ(tmp_path, capsys, what, rank):
    files = rank_files(small_model(), 2)
    if what in OTHER_TENSORS:
        put(files[rank], *OTHER_TENSORS[what])
        mentioned = tmp_path, ".pth: ", "norm."
        refused(capsys, tmp_path, files, errors.ShardMismatchError, *mentioned)
    else:
        put(files[rank], *OTHER_MODELS[what])
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


BLOCK = ("parameters", "block.flat_param_0")
DAMAGES = {
    "format": ("format", "other"),
    "version": ("version", 2),
    **{f"no-{field}": (field, None) for field in ("world_size", "rank", "parameters", "buffers")},
    "world-size-0": ("world_size", 0),
    "parameters-int-keys": ("parameters", {1: {}}),
    "layout-unknown": (*BLOCK, "layout", "columns"),
    "layout-dim0-of-several": (*BLOCK, "layout", "dim0"),
    "layout-dim0-of-scalar": ("parameters", "scalar", "layout", "dim0"),
    "numel-wrong": (*BLOCK, "numel", 15),
    "members-none": ("parameters", "nothing", "members", []),
    "member-without-name": (*BLOCK, "members", 0, "names", []),
    "members-overlap": (*BLOCK, "members", 3, "offset", 11),
    "members-gap": (*BLOCK, "members", 0, "offset", 1),
    "name-twice": (*BLOCK, "members", 1, "names", ["block.fc.weight"]),
    "dtype-unknown": ("buffers", "norm.mean", "float31"),
    "dtype-not-a-dtype": ("buffers", "norm.mean", "nn"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_metadata_that_contradicts_itself(tmp_path, capsys, damage):
    files = rank_files(small_model(), 2)
    put(files[1]["shard_metadata"], *damage)
    refused(capsys, tmp_path, files, errors.InvalidMetadataError, path_of(tmp_path, 1, 2))
