"""Saved by N ranks in one wrapping, loaded by M in another: same values, and training goes on."""

import checkpoint_files as files
import pytest
import torch
import torch_xla.core.xla_model as xm
from checkpoint_runs import WRAPPINGS, Run, adam, averaged, heavy_ball, nesterov, wrapped
from on_ranks import finish_step, on_each_rank
from small_models import wrapped as in_units
from torch import nn
from zoo import Zoo

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import (
    full_optim_state_dict,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from xla_fsdp.consolidate.errors import (
    CoverageError,
    InvalidMetadataError,
    ModelMismatchError,
    OtherRankError,
)
from xla_fsdp.consolidate.format.manifest import ShardingRule
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

FEW, MANY = (4,), (1, 2, 3, 4, 7, 8)
# A wrapping for each number of ranks, so that every pair of counts also changes the wrapping.
BY_COUNT = dict(zip(MANY, WRAPPINGS, strict=True))
slow = pytest.mark.slow


def _full(run: Run) -> dict[str, torch.Tensor]:
    """Elements of the unsharded parameters and optimizer state."""
    state = full_state_dict(run.model, rank0_only=False)
    found = {f"{name} ": state[name] for name, _ in Zoo().named_parameters()}
    optimizer = full_optim_state_dict(run.model, run.optimizer, rank0_only=False)["state"]
    for name, values in optimizer.items():
        found |= {f"{name} {key}": value for key, value in values.items()}
    return {name: torch.as_tensor(value).reshape(-1) for name, value in found.items()}


def _train_and_save(rank, size, kind, path):
    run = Run(kind, rank, size)
    run.train(0, 2)
    run.save(path, 2, extra={"shape": (1, 2)})
    return _full(run)


def _load_and_save(rank, size, kind, path, saved_as):
    run = Run(kind, rank, size, seed=9)
    assert run.load(path).extra == {"shape": (1, 2)}
    run.save(saved_as, 3, extra={"shape": (1, 2)})
    return _full(run)


def _different(found: dict, expected: dict) -> list[str]:
    # An optimizer that never saw a gradient of one parameter has no state of it, but as a part of
    # a vector it has.
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


@pytest.mark.parametrize("counts", [FEW, pytest.param(MANY, marks=slow)], ids=["few", "many"])
def test_every_number_of_ranks_loads_what_every_other_saved(run_ranks, tmp_path, counts):
    expected = run_ranks(_train_and_save, 3, 3, "nested", tmp_path / "start")[0]
    last = "start"
    for size in counts:
        places = tmp_path / last, tmp_path / str(size)
        found = run_ranks(_load_and_save, size, size, BY_COUNT[size], *places)[0]
        assert not _different(found, expected), size
        last = str(size)
    # The first number of ranks, of which a worker is still there.
    found = run_ranks(_load_and_save, 3, 3, "rows", tmp_path / last, tmp_path / "again")[0]
    assert not _different(found, expected)


@pytest.mark.parametrize(
    "kind, optimizer",
    [
        ("nested", adam),
        pytest.param("flat", nesterov, marks=slow),
        pytest.param("rows", averaged, marks=slow),
        pytest.param("none", heavy_ball, marks=slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@on_each_rank(3)
def test_on_as_many_ranks_training_resumes_bit_for_bit(rank, size, folder, kind, optimizer):
    run = Run(kind, rank, size, optimizer=optimizer)
    run.train(0, 2)
    run.save(folder, 2)
    draw = [torch.rand(3), torch.rand(3, device="xla").cpu()]
    losses, expected = run.train(2, 4), _full(run)
    other = Run(kind, rank, size, seed=9, optimizer=optimizer)
    other.load(folder)
    again = [torch.rand(3), torch.rand(3, device="xla").cpu()]
    assert torch.equal(draw[0], again[0]), "torch's random state"
    assert torch.equal(draw[1], again[1]), "XLA's random state"
    assert other.train(2, 4) == losses
    assert not _different(_full(other), expected)
    assert run.scheduler.state_dict() == other.scheduler.state_dict()


def _small(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 5))
    if form == "flat":
        return FSDP(model, flatten_parameters=True)
    return in_units(model, "0", wrap=FSDP if form == "wrapper" else fully_shard)


def _losses(rank, size, form, optimizer, folder, first, last):
    """Losses of steps ``first .. last``, each on 8 samples; a checkpoint is saved or loaded."""
    model = _small(form)
    update = optimizer(model.parameters())
    if first:
        load_checkpoint(folder, model, update)
    losses, share = [], 8 // size
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 7, generator=random), torch.randn(8, 5, generator=random)
        own = slice(rank * share, (rank + 1) * share)
        loss = (model(x[own].to("xla")) - y[own].to("xla")).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        finish_step(update)
        losses.append(xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / size).item())
    if not first:
        save_checkpoint(folder, model, update, step=last)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [adam, heavy_ball], ids=["adam", "momentum"])
@pytest.mark.parametrize("form", ["wrapper", "flat", "in place"])
def test_on_other_numbers_of_ranks_losses_go_on(run_ranks, tmp_path, form, optimizer):
    given = form, optimizer, str(tmp_path / "saved")
    expected = run_ranks(_losses, 4, 4, form, optimizer, str(tmp_path / "all"), 0, 4)[0]
    assert run_ranks(_losses, 4, 4, *given, 0, 2)[0] == expected[:2]
    for size in (1, 2, 8):
        found = run_ranks(_losses, size, size, *given, 2, 4)[0]
        assert found == pytest.approx(expected[2:], rel=1e-5), size


@on_each_rank(3)
def test_what_does_not_fit_the_model_is_named_on_every_rank(rank, size, folder):
    run = Run("nested", rank, size)
    run.train(0, 1)
    run.save(folder, 1)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    own = Run("root", rank, size, seed=5)
    own.model.module.more = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ModelMismatchError, match="lacks 'more'; strict=False"):
        own.load(folder)
    own.scheduler = own.optimizer = None
    own.load(folder, strict=False)
    after = own.model.state_dict()
    alike = [n for n, value in before.items() if n in after and after[n].shape == value.shape]
    assert all(torch.equal(before[n].cpu(), after[n].cpu()) for n in alike) and len(alike) > 20
    # What the model lacks can be left out of the optimizer too.
    smaller = Zoo()
    smaller.norm = torch.nn.Identity()
    own.model = wrapped("root", smaller)
    own.optimizer = adam([p for p in own.model.parameters() if p.requires_grad])
    with pytest.raises(ModelMismatchError, match="has 'norm.weight', .*unknown to the"):
        own.load(folder)
    own.load(folder, strict=False)
    assert all(state["step"] == 1 for state in own.optimizer.state.values())
    run.optimizer.param_groups[0]["lr"] = 0.5
    saved, run.scheduler = run.scheduler, torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
    with pytest.raises(ModelMismatchError, match="with another scheduler, not StepLR"):
        run.load(folder)
    assert run.optimizer.param_groups[0]["lr"] == 0.5
    run.scheduler = run.optimizer
    with pytest.raises(TypeError, match="must be a learning rate scheduler, got a"):
        run.load(folder, strict=False)
    run.scheduler = saved
    if rank == 1:
        run.model.module.head.weight = torch.nn.Parameter(torch.zeros(2, 2, device="xla"))
    with pytest.raises((ModelMismatchError, OtherRankError), match="'head.weight'|rank 1 could"):
        run.load(folder)


def test_a_rule_is_what_the_files_say(run_ranks, tmp_path):
    def save_all(rank):
        return [Run(kind, rank, 3).save(f"{tmp_path}/{kind}", 1) for kind in WRAPPINGS]

    for path in run_ranks(save_all, 3)[0]:
        checkpoint, partly = ShardedCheckpoint(path), ShardedCheckpoint(path)
        for name, tensor in checkpoint.manifest.parameters.items():
            rule = checkpoint.manifest.sharding_rules[name]
            by_rule = list(rule.pieces(tensor.numel, 0, tensor.numel))
            assert by_rule == checkpoint.pieces(name), (path, name)
            if tensor.numel:
                whole = checkpoint.read(name, 0, tensor.numel)
                part = partly.read(name, tensor.numel // 2, tensor.numel)
                assert torch.equal(part, whole[tensor.numel // 2 :])
        fresh = ShardedCheckpoint(path)
        fresh.read(next(iter(checkpoint.manifest.parameters)), 0, 1)
        assert len(fresh._files) == 1
    parameters = checkpoint.manifest.parameters
    name = max(parameters, key=lambda name: parameters[name].numel)  # more than a shard
    with files.forged(path) as body:
        right = body["spans"][name]
        body["spans"][name] = [3, 1, right[2], right[3]]  # ranks 3, 4, ...
    with pytest.raises(CoverageError, match="says that rank 3 has elements 0 to .*3 ranks"):
        ShardedCheckpoint(path).read(name, 0, 1)
    for wrong in ([0, 1, 0, 0], [0, 0, 5, 0], [0, 1, 5], [0, 1, -5, 0], [0, 1, 5, True], "all"):
        with files.forged(path) as body:
            body["spans"][name] = wrong
        with pytest.raises(InvalidMetadataError, match="the span of"):
            ShardedCheckpoint(path)
    with files.forged(path) as body:
        body["spans"][name] = [0, 1, right[2] + 1, right[3]]
    for look in (lambda c: c.read(name, 0, 1), lambda c: c.verify()):
        with pytest.raises(CoverageError, match="the manifest says"):
            look(ShardedCheckpoint(path))
    with files.forged(path) as body:
        del body["spans"][name]
    with pytest.raises(InvalidMetadataError, match="the span of .* is None"):
        ShardedCheckpoint(path)
    with files.forged(path) as body:
        del body["spans"]  # as earlier versions wrote it
    ShardedCheckpoint(path).verify()


def test_spans():
    # A vector of 100 and 60 elements in shards of 64, of ranks 1, 3, 5.
    first, second = ShardingRule(1, 2, 64, 0), ShardingRule(1, 2, 64, 100)
    assert list(first.pieces(100, 0, 100)) == [(0, 64, 1), (64, 100, 3)]
    assert list(second.pieces(60, 0, 60)) == [(0, 28, 3), (28, 60, 5)]
    assert list(second.pieces(60, 28, 29)) == [(28, 60, 5)] and not list(second.pieces(60, 5, 5))
    assert [second.range_of_rank(rank, 60) for rank in range(7)] == [
        (0, 0), (0, 0), (0, 0), (0, 28), (0, 0), (28, 60), (0, 0)
    ]  # fmt: skip
