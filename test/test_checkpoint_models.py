"""Kinds of models and optimizers that checkpoints must cope with."""

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from torch import nn
from zoo import Scaled

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.checkpoint.loading import Reader, prepare
from xla_fsdp.checkpoint.rank_exchange import RankExchange
from xla_fsdp.consolidate.errors import OtherRankError, UnsupportedValueError
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint


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


def _optimizers(rank, folder, names):
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
        mine, theirs = optimizer.state_dict(), again.state_dict()
        assert mine["param_groups"] == theirs["param_groups"], name
        for number, state in mine["state"].items():
            for key, value in state.items():
                found = theirs["state"][number][key]
                assert type(value) is type(found), (name, key)
                if isinstance(value, torch.Tensor) and key != "step_size":  # differs in padding
                    assert value.dtype == found.dtype, (name, key)
                    assert value.device == found.device, (name, key)
                    assert torch.equal(value.cpu(), found.cpu()), (name, key)


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_every_optimizer_of_torch_goes_on_as_if_nothing_had_happened(run_ranks, tmp_path, names):
    run_ranks(_optimizers, 2, str(tmp_path), names)


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
    factored = torch.optim.Adafactor(model.parameters())
    _gradients(model, 1)
    with pytest.raises(xla_fsdp.ShardedParameterError, match="NO_SHARD"):
        factored.step()


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


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x):
        return x + self.down(self.up(x).relu()) * self.scale


def _stack(scanned: bool, seed: int):
    torch.manual_seed(seed)
    model = nn.Module()
    blocks = [_Block() for _ in range(3)]
    if scanned:
        model.blocks = xla_fsdp.scan_blocks(blocks)
    else:
        model.blocks = nn.Sequential(*[FSDP(block) for block in blocks])
    model.head = nn.Linear(6, 2)
    model.forward = lambda x: model.head(model.blocks(x))
    wrapped = FSDP(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.1)


def _train(model, optimizer) -> list[float]:
    losses = []
    for seed in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to("xla")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


@on_each_rank(3)
def test_scanned_blocks_exchange_checkpoints_with_blocks_wrapped_singly(rank, size, folder):
    for scanned in (True, False):
        model, optimizer = _stack(scanned, 0)
        _train(model, optimizer)
        xla_fsdp.save_checkpoint(f"{folder}/{scanned}", model, optimizer, step=1)
        expected = _train(model, optimizer)
        for other in (True, False):
            again, resumed = _stack(other, 7)
            xla_fsdp.load_checkpoint(f"{folder}/{scanned}", again, resumed)
            found = _train(again, resumed)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _groups(rank, folder):
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
    prepare(Reader(checkpoint, RankExchange()), model, None, None, True, False)
    return sorted(checkpoint._files)


def test_replicas_are_saved_once_and_open_their_own_file_and_that_with_their_shard(
    run_ranks, tmp_path
):
    assert run_ranks(_groups, 4, str(tmp_path)) == [[0], [1], [0, 2], [1, 3]]
    checkpoint = ShardedCheckpoint(str(tmp_path))
    ranges = [file.range_of("weight") for file in checkpoint.files()]
    assert ranges == [(0, 640), (640, 1200), (0, 0), (0, 0)]


@on_each_rank(1)
def test_state_of_a_single_number_is_told_from_a_count(rank, size, folder):
    builds = {"alone": Scaled, "sharded": lambda: FSDP(Scaled(), flatten_parameters=True)}
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
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
