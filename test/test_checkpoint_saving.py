"""Saving: what is kept, what is refused, and saving while training goes on."""

import os
from pathlib import Path

import pytest
import torch
import torch_xla.core.xla_model as xm
from checkpoint_runs import Run
from on_ranks import on_each_rank

import xla_fsdp
from xla_fsdp.checkpoint import rank_exchange, saving
from xla_fsdp.consolidate import errors
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint
from xla_fsdp.ranks.rank import current_rank


def _names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def _kept(folder) -> list[str]:
    """Names, once rank 0 has removed what it does not keep, for which the others do not wait."""
    xm.rendezvous("tidied")
    return _names(folder)


@on_each_rank(3)
def test_the_newest_are_kept_and_a_step_saved_again_replaces_itself(rank, size, folder):
    folder += "/a [b] *ü"
    run = Run("nested", rank, size)
    assert xla_fsdp.latest_checkpoint(folder) is None
    assert run.load(folder, missing_ok=True) is None
    for step in (1, 2, 3):
        run.save(folder, step, keep_last=2)
    assert _kept(folder) == ["step-00000002", "step-00000003"]
    again = run.save(folder, 3, extra="again")
    assert again == f"{folder}/step-00000003.2" == xla_fsdp.latest_checkpoint(folder)
    assert _kept(folder) == ["step-00000002", "step-00000003.2"]
    assert run.load(folder).extra == "again"
    assert run.load(f"{folder}/step-00000002").step == 2
    assert run.load(folder, step=3).extra == "again" and run.load(folder, step=2).step == 2
    assert xla_fsdp.latest_checkpoint(folder, step=2) == f"{folder}/step-00000002"
    assert run.load(folder, missing_ok=True).step == 3
    assert xla_fsdp.latest_checkpoint(folder, step=1) is None
    assert run.load(folder, missing_ok=True, step=1) is None
    refused = errors.CheckpointNotFoundError, errors.OtherRankError
    with pytest.raises(refused, match="no complete checkpoint of step 1"):
        run.load(folder, step=1)
    if rank == 0:
        with pytest.warns(UserWarning, match="has step-00000003.2, which is later"):
            run.save(folder, 1, keep_last=1)
    else:
        run.save(folder, 1, keep_last=1)
    assert _kept(folder) == ["step-00000001", "step-00000002", "step-00000003.2"]


@on_each_rank(3)
def test_what_cannot_be_saved_or_loaded_is_said_on_every_rank(rank, size, folder):
    run = Run("nested", rank, size)
    for options, kind, message in (
        ({"step": -1}, ValueError, "at least 0 and less than .*, got -1"),
        ({"step": 1.5}, TypeError, "step must be an int, got float"),
        ({"step": 1, "keep_last": 0}, ValueError, "keep_last must be an int of at least 1"),
        (
            {"step": 1, "extra": {"a": [1, object()]}},
            errors.UnsupportedValueError,
            r"extra\['a'\]\[1\]",
        ),
    ):
        failed = (kind, errors.OtherRankError) if rank else kind
        with pytest.raises(failed, match=message):
            xla_fsdp.save_checkpoint(folder, run.model, **options)
    with pytest.raises(TypeError, match="must be a torch.optim.Optimizer, got SGD_"):
        xla_fsdp.save_checkpoint(folder, run.model, type("SGD_", (), {})(), step=1)
    foreign = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1)
    with pytest.raises(errors.ModelMismatchError, match="Create the optimizer after wrapping"):
        xla_fsdp.save_checkpoint(folder, run.model, foreign, step=1)
    with pytest.raises(errors.ModelMismatchError, match="rank 1 and rank 0 save different models"):
        xla_fsdp.save_checkpoint(folder, run.model, step=1 + (rank == 1))
    for buffer, kind, message in (
        (torch.ones(2, device="meta"), ValueError, "buffer 'b' is on the meta device"),
        (torch.eye(2).to_sparse(), errors.UnsupportedValueError, "'b' is torch.sparse_coo"),
    ):
        strange = torch.nn.Linear(2, 2)
        strange.register_buffer("b", buffer)
        with pytest.raises(kind, match=message):
            xla_fsdp.save_checkpoint(folder, strange, step=1)
    Path(folder, "file").write_text("not of a checkpoint")
    for path, kind in (
        (folder + "/nothing", errors.CheckpointNotFoundError),
        (folder, errors.IncompleteCheckpointError),
    ):
        with pytest.raises(kind if rank == 0 else errors.OtherRankError):
            run.load(path)
    assert _names(folder) == ["file"]


def test_one_process_without_a_launch_saves_and_loads(run_script, tmp_path):
    script = """
import os, sys, time, torch, xla_fsdp
model = torch.nn.Linear(3, 2)
print(xla_fsdp.save_checkpoint(sys.argv[1], model, step=7))
other = torch.nn.Linear(3, 2)
print(xla_fsdp.load_checkpoint(sys.argv[1], other).step, torch.equal(model.weight, other.weight))
fsync = os.fsync
os.fsync = lambda file: (time.sleep(0.3), fsync(file))  # the program ends before the save
os.chdir(sys.argv[1])
xla_fsdp.AsyncCheckpointer("run").save(model, step=8)
os.chdir("/")
"""
    done = run_script(script, tmp_path, env={"PJRT_DEVICE": "CPU"})
    assert done.stdout.split() == [f"{tmp_path}/step-00000007", "7", "True"], done.stderr
    later = xla_fsdp.latest_checkpoint(tmp_path / "run")
    assert later == f"{tmp_path}/run/step-00000008", done.stderr


@on_each_rank(2)
def test_hosts_that_share_no_file_system_are_refused(rank, size, folder):
    """Ranks with a file system each: rank 1 looks into another folder."""
    run = Run("nested", rank, size)
    original = saving.open_store, rank_exchange._VISIBLE_SECONDS
    if rank == 0:

        def elsewhere(path, label="path"):
            own = f"{path}-of-rank-1" if current_rank().rank == 1 else path
            return original[0](own, label)

        saving.open_store, rank_exchange._VISIBLE_SECONDS = elsewhere, 0.2
    try:
        kind = errors.SharedStorageError if rank == 1 else errors.OtherRankError
        with pytest.raises(kind, match="a file system or object store that all hosts share"):
            run.save(folder, 1)
        checkpointer = xla_fsdp.AsyncCheckpointer(folder)
        with pytest.raises(kind, match="that all hosts share"):
            checkpointer.save(run.model, step=1)
        assert checkpointer.wait() is None
    finally:
        if rank == 0:
            saving.open_store, rank_exchange._VISIBLE_SECONDS = original
    assert _names(folder) == []


@on_each_rank(3)
def test_saves_under_way_are_no_leftovers_to_each_other(rank, size, folder):
    """A save on demand (of a preemption handler, say) while another is being written."""
    run = Run("nested", rank, size)
    checkpointer = xla_fsdp.AsyncCheckpointer(folder)
    for step in (1, 2):
        checkpointer.save(run.model, run.optimizer, step=step)
        run.save(folder, step + 10)
        run.save(folder, step)
    checkpointer.wait()
    names = _names(folder)
    assert {"step-00000011", "step-00000012"} < set(names), names
    assert {name[:13] for name in names} == {f"step-000000{n}" for n in ("01", "02", "11", "12")}
    for name in names:
        ShardedCheckpoint(f"{folder}/{name}").verify()
