"""Saving: what is kept, what is refused, and kinds of models and optimizers."""

import os
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from checkpoint_runs import Run
from on_ranks import on_each_rank, raises
from small_models import Computes
from torch import nn
from wrappings import assert_equal, stacked
from wrappings import step as train_step

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.checkpoint import rank_exchange, saving
from xla_fsdp.checkpoint.loading import Reader, prepare_load
from xla_fsdp.checkpoint.rank_exchange import RankExchange
from xla_fsdp.consolidate import errors
from xla_fsdp.consolidate.errors import OtherRankError, UnsupportedValueError
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
    raises(refused, "no complete checkpoint of step 1", run.load, folder, step=1)
    raises(refused, "is one checkpoint, .* Pass the folder above it", run.load, again, step=3)
    for wrong in ("3", True):
        said = "step must be an int or None"
        raises((TypeError, errors.OtherRankError), said, run.load, folder, step=wrong)
        raises(TypeError, said, xla_fsdp.latest_checkpoint, folder, step=wrong)
    if rank == 0:
        with pytest.warns(UserWarning, match="has step-00000003.2, which is later"):
            run.save(folder, 1, keep_last=1)
    else:
        run.save(folder, 1, keep_last=1)
    assert _kept(folder) == ["step-00000001", "step-00000002", "step-00000003.2"]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no message")


def raise_unprintable():
    raise Unprintable


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
        raises(failed, message, xla_fsdp.save_checkpoint, folder, run.model, **options)
    with pytest.raises(TypeError, match="must be a torch.optim.Optimizer, got SGD_"):
        xla_fsdp.save_checkpoint(folder, run.model, type("SGD_", (), {})(), step=1)
    for scheduler, message in (
        (run.optimizer, "scheduler must be a learning rate scheduler, got a Adam"),
        (run.model, "scheduler must be a learning rate scheduler, got a "),
        (object(), r"scheduler must have a state_dict\(\), got a object"),
    ):
        with pytest.raises(TypeError, match=message):
            xla_fsdp.save_checkpoint(folder, run.model, run.optimizer, scheduler, step=1)
    failed = Unprintable if rank == 0 else errors.OtherRankError
    with pytest.raises(failed) as caught:
        scheduler = torch.optim.lr_scheduler.ConstantLR(run.optimizer)
        if rank == 0:
            scheduler.state_dict = raise_unprintable
        xla_fsdp.save_checkpoint(folder, run.model, run.optimizer, scheduler, step=1)
    if rank != 0:
        assert "Unprintable (its message raises an exception)" in str(caught.value)
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
        raises(kind, message, xla_fsdp.save_checkpoint, folder, strange, step=1)
    Path(folder, "file").write_text("not of a checkpoint")
    for path, kind in (
        (folder + "/nothing", errors.CheckpointNotFoundError),
        (folder + "/file", errors.NotAFolderError),
        (folder, errors.IncompleteCheckpointError),
    ):
        with pytest.raises(kind if rank == 0 else errors.OtherRankError):
            run.load(path, missing_ok=kind is errors.NotAFolderError)
    with pytest.raises(ValueError, match="keep_last must be an int of at least 1"):
        xla_fsdp.AsyncCheckpointer(folder, keep_last=0)
    no_path = r"(path|fast) must be a str or a path, got NoneType"
    for refuses in (
        lambda: xla_fsdp.load_checkpoint(None, run.model),
        lambda: xla_fsdp.save_checkpoint(None, run.model, step=1),
        lambda: xla_fsdp.AsyncCheckpointer(None),
        lambda: xla_fsdp.TieredCheckpointer(None, fast=folder),
        lambda: xla_fsdp.TieredCheckpointer(folder, fast=None),
        lambda: xla_fsdp.to_dcp(None, run.model),
        lambda: xla_fsdp.from_dcp(None, run.model, allow_pickle=True),
    ):
        raises((TypeError, errors.OtherRankError), no_path, refuses)
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
        raises(kind, "a file system or object store that all hosts share", run.save, folder, 1)
        checkpointer = xla_fsdp.AsyncCheckpointer(folder)
        raises(kind, "that all hosts share", checkpointer.save, run.model, step=1)
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


def _gradients(model, seed: int) -> None:
    model.zero_grad()
    x = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(seed))
    model(x.to("xla")).square().sum().backward()


FEW = ["Adam", "AdamW", "ASGD", "SGD"]
MORE = ["Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
OPTIONS = {
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "AdamW": {"capturable": False, "lr": torch.tensor(0.01)},
}


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"]
)
@on_each_rank(2)
def test_every_optimizer_of_torch_goes_on_as_if_nothing_had_happened(rank, size, folder, names):
    for name in names:
        pair = []
        for _ in range(2):
            torch.manual_seed(0)
            model = FSDP(nn.Sequential(nn.Linear(9, 5)))
            options = OPTIONS.get(name, {})
            pair.append((model, getattr(torch.optim, name)(model.parameters(), **options)))
        (model, optimizer), (other, again) = pair
        for seed in (1, 2):
            _gradients(model, seed)
            optimizer.step()
        torch_xla.sync()
        path = xla_fsdp.save_checkpoint(f"{folder}/{name}", model, optimizer, step=1)
        xla_fsdp.load_checkpoint(path, other, again)
        _gradients(model, 3)
        optimizer.step()
        _gradients(other, 3)
        again.step()
        torch_xla.sync()
        for one, resumed in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.cpu(), resumed.cpu()), name
        states = [one.state_dict() for one in (again, optimizer)]
        for state in (each for one in states for each in one["state"].values()):
            state.pop("step_size", None)  # differs in padding
        assert_equal(*states)


@on_each_rank(3)
def test_state_that_cannot_be_saved_raises(rank, size, folder):
    model = FSDP(nn.Sequential(nn.Linear(12, 8)), shard_param_on_dim_0=True)
    narrow = FSDP(nn.Sequential(nn.Linear(1, 8)), shard_param_on_dim_0=True)
    for which, state, words in (
        (model, {"row_var": torch.ones(3, 1)}, "'row_var' of '0.weight' has shape"),
        (narrow, {"scale": torch.ones(1) * (1 + rank)}, "different single values"),
    ):
        optimizer = torch.optim.SGD(which.parameters(), lr=0.1)
        optimizer.state[which[0].weight] = {key: value.to("xla") for key, value in state.items()}
        with pytest.raises(UnsupportedValueError, match=words):
            xla_fsdp.save_checkpoint(folder, which, optimizer, step=1)


class _Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("kept", torch.arange(4.0, dtype=torch.float64))
        self.register_buffer("lost", torch.ones(2), persistent=False)
        self.register_buffer("flag", torch.tensor(True))
        self.again = self.norm
        self.note = None

    def get_extra_state(self):
        return {"note": self.note, 3: (1, float("inf"))}

    def set_extra_state(self, state):
        self.note = state["note"]

    def forward(self, x):
        return self.norm(x)


def _buffers(rank, size, folder, saves):
    torch.manual_seed(0)
    inner = _Noted()
    model = FSDP(inner, compute_dtype=torch.bfloat16)
    inner.note, inner.lost = "first", inner.lost * 5
    if saves:
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)).to("xla"))
        torch_xla.sync()
        xla_fsdp.save_checkpoint(folder, model, step=1)
    torch.manual_seed(1)
    other_inner = _Noted()
    other = FSDP(other_inner)
    xla_fsdp.load_checkpoint(folder, other)
    assert other_inner.note == "first"
    assert other_inner.kept.dtype == torch.float64  # this wrapper casts nothing
    assert torch.equal(other_inner.kept.cpu(), torch.arange(4.0, dtype=torch.float64))
    assert torch.equal(other_inner.lost.cpu(), torch.ones(2)) and other_inner.flag.item()
    return other_inner.norm.running_mean.float().cpu(), other_inner.norm.num_batches_tracked.item()


def test_ranks_get_their_own_batch_statistics_back_and_new_ranks_the_first_ones(
    run_ranks, tmp_path
):
    saved = run_ranks(_buffers, 3, 3, str(tmp_path), True)
    assert len({tuple(mean.tolist()) for mean, _ in saved}) == 3
    assert all(count == 1 for _, count in saved)
    for mean, _ in run_ranks(_buffers, 4, 4, str(tmp_path), False):
        assert torch.equal(mean, saved[0][0])
    buffers = ShardedCheckpoint(str(tmp_path)).manifest.buffers
    names = ("norm.running_mean", "again.running_mean")
    assert buffers["norm.running_mean"].names == names
    assert buffers["kept"].restore == "F64" and buffers["kept"].dtype == "BF16"


@on_each_rank(3)
def test_scanned_blocks_exchange_checkpoints_with_blocks_wrapped_singly(rank, size, folder):
    def built(kind):
        model = stacked(kind)  # always of one seed: some buffers are not saved
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)

    def train(model, optimizer):
        return [train_step(model, optimizer, number, rank, size).item() for number in range(2)]

    for saved in ("scan", "nested"):
        model, optimizer = built(saved)
        train(model, optimizer)
        xla_fsdp.save_checkpoint(f"{folder}/{saved}", model, optimizer, step=1)
        expected = train(model, optimizer)
        for other in ("scan", "nested"):
            again, resumed = built(other)
            xla_fsdp.load_checkpoint(f"{folder}/{saved}", again, resumed)
            torch.testing.assert_close(train(again, resumed), expected, rtol=1e-5, atol=1e-6)


@on_each_rank(4)
def test_replicas_are_saved_once_and_open_the_file_with_their_shard(rank, folder):
    options = {"sharding_rank": rank % 2, "sharding_world_size": 2}
    options["sharding_groups"] = [[0, 1], [2, 3]]
    torch.manual_seed(0)
    model = FSDP(nn.Linear(40, 30), replication_groups=[[0, 2], [1, 3]], **options)
    values = model.weight.detach().cpu().clone()
    xla_fsdp.save_checkpoint(folder, model, step=1)
    torch.manual_seed(1)
    other = FSDP(nn.Linear(40, 30))
    xla_fsdp.load_checkpoint(folder, other)
    again = FSDP(nn.Linear(40, 30), replication_groups=[[0, 2], [1, 3]], **options)
    xla_fsdp.load_checkpoint(folder, again)
    assert torch.equal(values, again.weight.detach().cpu())
    independent = FSDP(nn.Linear(40, 30), **options)
    with pytest.raises((ValueError, OtherRankError), match="pass replication_groups"):
        xla_fsdp.save_checkpoint(folder, independent, step=2)
    checkpoint = ShardedCheckpoint(folder)
    prepare_load(Reader(checkpoint, RankExchange(), folder), model, None, None, True, False)
    assert list(checkpoint._files) == [rank % 2]
    ranges = [file.range_of("weight") for file in checkpoint.files()]
    assert ranges == [(0, 640), (640, 1200), (0, 0), (0, 0)]


def scaled():
    """Has only a 0-d parameter: shapes do not tell which state is one number."""
    return Computes(lambda self, x: x * self.scale, scale=nn.Parameter(torch.tensor(2.0)))


@on_each_rank(1)
def test_state_of_a_single_number_is_told_from_a_count(rank, size, folder):
    builds = {"alone": scaled, "sharded": lambda: FSDP(scaled(), flatten_parameters=True)}
    values = {}
    for saved in builds:
        model = builds[saved]().to("xla")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(3, device="xla")).sum().backward()
        optimizer.step()
        xla_fsdp.save_checkpoint(f"{folder}/{saved}", model, optimizer, step=1)
        for loaded, build in builds.items():
            other = build().to("xla")
            again = torch.optim.Adam(other.parameters())
            xla_fsdp.load_checkpoint(f"{folder}/{saved}", other, again)
            other(torch.ones(3, device="xla")).sum().backward()
            again.step()
            values[saved, loaded] = xla_fsdp.full_state_dict(other, rank0_only=False)["scale"]
            (holder,) = other.parameters()
            assert again.state[holder]["exp_avg"].shape == holder.shape
            assert again.state[holder]["step"].shape == () and again.state[holder]["step"] == 2
    assert len({value.item() for value in values.values()}) == 1, values


@on_each_rank(1)
def test_a_backward_after_loading_is_not_that_of_the_forward(rank, size, folder):
    model = nn.Linear(3, 2).to("xla")
    path = xla_fsdp.save_checkpoint(folder, model, step=1)
    loss = model(torch.ones(4, 3, device="xla", requires_grad=True)).sum()
    xla_fsdp.load_checkpoint(path, model)
    raises(RuntimeError, "modified by an inplace operation", loss.backward)
