"""A damaged checkpoint raises an error that names the file, and nothing is loaded from it."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import checkpoint_files as files
import pytest
import torch
import torch_xla
from checkpoint_files import copied, flip, forged, forged_file, forged_header, take_out
from on_ranks import raises

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import load_checkpoint, save_checkpoint
from xla_fsdp.consolidate.errors import (
    CheckpointError,
    CorruptFileError,
    CoverageError,
    InvalidMetadataError,
    MissingRankError,
    MixedSaveError,
    ShardMismatchError,
    UnsupportedValueError,
)
from xla_fsdp.consolidate.format import manifest
from xla_fsdp.consolidate.format.manifest import NAME, file_name
from xla_fsdp.consolidate.format.reader import RankFile, ShardedCheckpoint, latest_checkpoint
from xla_fsdp.testing import run_in_ranks

WORLD = 3
RANK_FILES = [file_name(rank, WORLD) for rank in range(WORLD)]
ALL_FILES = [*RANK_FILES, NAME]


def _trained(seed):
    torch.manual_seed(seed)
    model = FSDP(files.Small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 16).to("xla")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch_xla.sync()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders of two steps of a run, and of step 5 of another run, saved by three ranks."""

    def save_twice(rank, root):
        model, optimizer = _trained(seed=1)
        return [save_checkpoint(root, model, optimizer, step=step, extra=step) for step in (5, 6)]

    roots = [tmp_path_factory.mktemp(name) for name in ("run", "other")]
    (five, six), (other, _) = (run_in_ranks(save_twice, WORLD, str(root))[0] for root in roots)
    return {"five": Path(five), "six": Path(six), "other": Path(other)}


def _refused(folder) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        ShardedCheckpoint(str(folder)).verify()
    return caught.value


@pytest.mark.parametrize("name", [RANK_FILES[2], NAME])
def test_a_bit_flipped_anywhere(tmp_path, monkeypatch, name):
    """The file of a rank has many chunks, and the error tells which."""
    monkeypatch.setattr("xla_fsdp.consolidate.format.digests._LEAST_CHUNK", 64)
    folder = Path(files.save(tmp_path, 5, 5.0))
    path, intact = folder / name, ShardedCheckpoint(folder)

    def refuse(offset):
        if name == NAME or offset % 100 == 0:  # opening all files takes long
            return _refused(folder)
        with pytest.raises(CheckpointError) as caught:
            RankFile(intact.store, intact.folder, intact.manifest, 2).verify()
        return caught.value

    with open(path, "r+b") as file:
        for offset, byte in enumerate(path.read_bytes()):
            for bit in {offset % 8, 0}:
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)
                error = refuse(offset)
                where = f"{path}: bytes {offset // 64 * 64} to " if name != NAME else str(path)
                assert isinstance(error, CorruptFileError) and where in str(error), offset
            os.pwrite(file.fileno(), bytes([byte]), offset)
    intact.verify()


def test_a_manifest_that_no_reader_accepts_is_not_written(monkeypatch):
    monkeypatch.setattr(manifest, "MAX_BYTES", 100)
    with pytest.raises(UnsupportedValueError, match="but can have at most 100"):
        manifest.dump_manifest(files.contents(0, 1, 1, 1.0, save_id="1" * 16).manifest)


LENGTHS = {
    "nothing": lambda size: 0,
    "8 bytes": lambda size: 8,
    "all but the last byte": lambda size: size - 1,
    "one byte more": lambda size: size + 1,
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [RANK_FILES[1], NAME])
def test_another_length(saved, tmp_path, name, length):
    path = copied(saved["five"], tmp_path) / name
    os.truncate(path, LENGTHS[length](path.stat().st_size))
    error = _refused(path.parent)
    assert isinstance(error, CorruptFileError) and str(path) in str(error)
    raises(CorruptFileError, name, latest_checkpoint, tmp_path)


def test_latest_falls_back_to_nothing_by_itself(saved, tmp_path):
    """Not to an older checkpoint: that is for a human to decide."""
    copied(saved["five"], tmp_path)
    six = copied(saved["six"], tmp_path)
    assert latest_checkpoint(tmp_path) == str(six)
    os.truncate(six / RANK_FILES[1], 100)
    raises(CorruptFileError, RANK_FILES[1], latest_checkpoint, tmp_path)
    shutil.rmtree(six)
    assert latest_checkpoint(tmp_path) == str(tmp_path / saved["five"].name)


# --- by hand: each changes a copy of step 5, and returns what is to be named in the error. All
# digests are right afterwards, but for those of exchange, replaced and damaged.


def exchange(folder, saved):
    one, two = folder / RANK_FILES[0], folder / RANK_FILES[1]
    data = one.read_bytes(), two.read_bytes()
    two.write_bytes(data[0]), one.write_bytes(data[1])
    return RANK_FILES[:2]


def replaced(folder, saved, name, by, source=None, names=None):
    """The file ``name`` is the file ``source`` of the save ``by``."""
    shutil.copy(saved[by] / (source or name), folder / name)
    return names or name


def damaged(folder, saved, name, how):
    how(folder / name, (folder / name).stat().st_size)
    return name


def adapted(folder, saved, change, *arguments):
    with forged(folder):
        return change(folder, saved, *arguments)


def in_manifest(folder, saved, change, names=NAME):
    with forged(folder) as body:
        change(body)
    return names


def lost(folder, saved, rank, kinds, tensor="linear.weight", names=None):
    for kind in kinds:
        take_out(folder, rank, f"{kind}/{tensor}")
    return names or RANK_FILES[rank]


def dtype(folder, saved, key, name):
    with forged_header(folder, 1) as header:
        header[key].update(dtype=name)
    return RANK_FILES[1]


def shifted(folder, saved, rank, by, names=None):
    with forged_header(folder, rank) as header:
        begins = json.loads(header["__metadata__"]["begins"])
        begins["linear.weight"] += by
        header["__metadata__"]["begins"] = json.dumps(begins)
    return names or RANK_FILES[rank]


def without_spans(folder, saved, change, *arguments):
    """The manifest does not say who stores what, as those of earlier versions."""
    names = change(folder, saved, *arguments)
    with forged(folder) as body:
        del body["spans"]
    return names


def renamed(folder, saved, old, new):
    with forged_header(folder, 0) as header:
        header[new] = header.pop(old)
    return RANK_FILES[0]


WEIGHT, MEAN = "linear.weight", "norm.running_mean"
EVERY_KIND = ("parameter", "state/exp_avg", "state/exp_avg_sq")
OTHER_SHAPE = in_manifest, lambda body: body["buffers"][0].update(shape=[41]), RANK_FILES
# The error, who changes the folder, and its arguments.
BY_HAND = {
    "exchange_and_adapt": (MixedSaveError, adapted, exchange),
    "without_a_file": (MissingRankError, damaged, RANK_FILES[2], lambda path, size: path.unlink()),
    "stale_world": (MixedSaveError, replaced, file_name(0, 2), "five", RANK_FILES[0]),
    "of_another_run": (CorruptFileError, replaced, RANK_FILES[1], "other"),
    "of_another_run_and_adapt": (MixedSaveError, adapted, replaced, RANK_FILES[1], "other"),
    "manifest_of_another_step": (MixedSaveError, replaced, NAME, "six"),
    "manifest_of_another_run": (CorruptFileError, replaced, NAME, "other", NAME, RANK_FILES),
    "file_of_another_dtype": (ShardMismatchError, dtype, f"parameter/{WEIGHT}", "I32"),
    "state_of_another_dtype": (ShardMismatchError, dtype, f"state/exp_avg/{WEIGHT}", "U32"),
    "manifest_of_another_buffer_shape": (ShardMismatchError, *OTHER_SHAPE),
    "gap": (CoverageError, without_spans, shifted, 1, 1, RANK_FILES),
    "overlap": (CoverageError, without_spans, shifted, 1, -1, RANK_FILES),
    "begins_beyond_the_end": (CoverageError, without_spans, shifted, 2, 1),
    "lost_last_piece": (CoverageError, without_spans, lost, 2, EVERY_KIND, WEIGHT, WEIGHT),
    "lost_state": (CoverageError, lost, 1, ["state/exp_avg_sq"]),
    "lost_parameter_of_a_state": (CoverageError, lost, 1, ["parameter"]),
    "lost_buffer": (ShardMismatchError, lost, 2, ["buffer"], MEAN),
    "renamed_parameter": (ShardMismatchError, renamed, f"parameter/{WEIGHT}", "parameter/x"),
    "of_unknown_kind": (InvalidMetadataError, renamed, f"buffer/{MEAN}", "unknown"),
    "of_another_version": (InvalidMetadataError, in_manifest, lambda body: body.update(version=3)),
}


def _names_one_of(text: str, names: str | Sequence[str]) -> bool:
    return any(name in text for name in ([names] if isinstance(names, str) else names))


@pytest.mark.parametrize("case", BY_HAND.values(), ids=list(BY_HAND))
def test_changed_by_hand(saved, tmp_path, case):
    folder = copied(saved["five"], tmp_path)
    kind, change, *arguments = case
    names = change(folder, saved, *arguments)
    error = _refused(folder)
    assert isinstance(error, kind), repr(error)
    assert str(folder) in str(error) and _names_one_of(str(error), names), error


def useless_random_state(folder, saved):
    """Right digests: it is only found out when somebody uses it."""
    with forged_file(folder, 1) as parts:
        header, tensors = parts
        begin, end = header["rank/rng.torch"]["data_offsets"]
        parts[1] = tensors[:begin] + b"\xff" * (end - begin) + tensors[end:]
    return RANK_FILES[1]


ON_RANKS = {
    **{f"flipped_{n}": (damaged, n, lambda path, size: flip(path, size // 2)) for n in ALL_FILES},
    f"cut_{NAME}": (damaged, NAME, lambda path, size: os.truncate(path, size - 1)),
    **{name: how for name, (_, *how) in BY_HAND.items()},
}


def _snapshot(model, optimizer):
    state = optimizer.state_dict()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for each in state["state"].values() for v in each.values()]
    return [t.detach().cpu().clone() for t in tensors], repr(state["param_groups"])


def _load_all(rank, folders):
    model, optimizer = _trained(seed=2)
    before = _snapshot(model, optimizer)
    outcomes = []
    for folder in folders:
        rng = torch.get_rng_state()
        try:
            load_checkpoint(folder, model, optimizer)
            outcomes.append(("nothing", ""))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
        after = _snapshot(model, optimizer)
        same = all(map(torch.equal, before[0], after[0])) and before[1] == after[1]
        assert same and torch.equal(rng, torch.get_rng_state()), folder
    found = load_checkpoint(folders[0] + "/../whole/step-00000005", model, optimizer)
    assert (found.step, found.extra) == (5, 5)
    assert not all(map(torch.equal, before[0], _snapshot(model, optimizer)[0]))
    return outcomes


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_every_rank_refuses_and_nothing_is_changed(run_ranks, saved, tmp_path, size):
    changes = dict(ON_RANKS)
    if size == WORLD:
        changes["useless_random_state"] = [useless_random_state]
    folders = [copied(saved["five"], tmp_path / title) for title in changes]
    pairs = zip(folders, changes.values(), strict=True)
    names = [change(one, saved, *arguments) for one, (change, *arguments) in pairs]
    copied(saved["five"], folders[0] / ".." / "whole")
    outcomes = run_ranks(_load_all, size, list(map(str, folders)))
    for title, name, *each in zip(changes, names, *outcomes, strict=True):
        kinds = {kind for kind, _ in each}
        own = kinds - {"OtherRankError"}
        assert "nothing" not in kinds and own, (title, each)
        if own == {"ModelMismatchError"}:  # nothing of it was read
            assert "manifest" in title, each
            continue
        if title in BY_HAND:
            assert own <= {BY_HAND[title][0].__name__, "CoverageError"}, (title, each)
        assert all(_names_one_of(text, name) for _, text in each), (title, each)
