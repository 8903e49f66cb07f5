"""Lightning's Trainer and Fabric with our strategies, against plain Lightning in one process."""

import csv
import re

import lightning as L
import pytest
import torch
import torch_xla.runtime as xr
from conftest import ROOT
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_models import CLIP, Block, Words, fit, loader, rows, strategy, trainer_for
from rank_warnings import every_rank_warns
from safetensors.torch import load_file

import xla_fsdp.integrations.lightning as integration
from xla_fsdp import XlaFullyShardedDataParallel, full_state_dict
from xla_fsdp.collectives.random_state import DeviceRandomState
from xla_fsdp.consolidate.__main__ import main as consolidate
from xla_fsdp.consolidate.errors import OtherRankError
from xla_fsdp.integrations.lightning import NAME, FabricStrategy, TrainerStrategy
from xla_fsdp.integrations.lightning.strategies import adopt

TIMEOUT = 400
CLIPPED = {"gradient_clip_val": CLIP, "accumulate_grad_batches": 2}
SHORT = {"max_epochs": 1, "limit_train_batches": 2}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}

# Of Lightning's, about the number of workers, cores and batches.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def plain(folder, model=None, ckpt_path=None, **options):
    """How plain Lightning trains on one process."""
    trainer = trainer_for(folder, devices=1, **options)
    found, model = fit(trainer, model=model, ckpt_path=ckpt_path)
    return found | {"weights": model.state_dict()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def reference(folder):
    return {
        "norm": plain(folder / "norm", **CLIPPED),
        "value": plain(folder / "value", **BY_VALUE),
    }


def assert_alike(found, wanted):
    """Of a run that was resumed the end is compared."""
    for name, near in (("losses", 1e-5), ("norms", 1e-4)):
        end = wanted[name][len(wanted[name]) - len(found[name]) :]
        torch.testing.assert_close(found[name], end, rtol=near, atol=near)
    assert found["losses"] and bool(found["norms"]) == bool(wanted["norms"])
    assert found["seen"] == pytest.approx(wanted["seen"], abs=1e-4)
    assert list(found["weights"]) == list(wanted["weights"])
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-4)


def ours(folder, model=None, ckpt_path=None, told=None, **options):
    trainer = trainer_for(folder, strategy(**options), **(told or {}))
    found, _ = fit(trainer, xr.world_size(), model, ckpt_path)
    return found | {"weights": full_state_dict(trainer.model)}


def training(rank, folder):
    recomputed = {"activation_checkpointing_policy": {Block}}
    found = {"norm": ours(folder / "full", told=CLIPPED, **recomputed)}
    if xr.world_size() == 1:
        return found
    sharded = {"state_dict_type": "sharded", "sharding_strategy": "SHARD_GRAD_OP"}
    logged = BY_VALUE | {"logger": CSVLogger(folder, name="log"), "log_every_n_steps": 1}
    logged["enable_model_summary"] = True
    found["value"] = ours(folder / "sharded", told=logged, **sharded)
    found["speaks"] = rank_zero_only.rank == 0, f"{rank_zero_only.rank}"
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_training_is_that_of_one_process(run_ranks, reference, folder, ranks):
    found = run_ranks(training, ranks, folder / str(ranks), timeout=TIMEOUT)
    for name in found[0].keys() & reference.keys():
        assert_alike(found[0][name], reference[name])
        for other in found[1:]:
            assert other[name]["losses"] == found[0][name]["losses"]
            assert other[name]["norms"] == found[0][name]["norms"]
    if ranks == 1:
        return
    assert [one["speaks"] for one in found] == [(rank == 0, str(rank)) for rank in range(2)]
    # One log of one rank.
    (log,) = folder.glob("2/log/*/metrics.csv")
    lines = list(csv.DictReader(log.read_text().splitlines()))
    losses = [float(line["loss_step"]) for line in lines if line["loss_step"]]
    assert losses == pytest.approx(reference["value"]["losses"], abs=1e-5)


# -- averages of weights -----------------------------------------------------------------------


class Averaged(Words):
    """As the refusal of callbacks that average recommends."""

    def on_fit_start(self):
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        self.averages = [torch.optim.swa_utils.AveragedModel(self.blocks, multi_avg_fn=average)]

    def on_train_batch_end(self, *args):
        self.averages[0].update_parameters(self.blocks)


def averaging(rank, folder):
    trainer = trainer_for(folder / str(rank), strategy(), **SHORT)
    found, model = fit(trainer, xr.world_size(), Averaged())
    return found["losses"], full_state_dict(model.averages[0].module)


@pytest.mark.slow
def test_a_module_averages_its_weights(run_ranks, tmp_path):
    _, expected = fit(trainer_for(tmp_path / "plain", devices=1, **SHORT), model=Averaged())
    for _, found in run_ranks(averaging, 2, tmp_path, timeout=TIMEOUT):
        if found:  # the first rank has it
            torch.testing.assert_close(
                found, expected.averages[0].module.state_dict(), rtol=1e-4, atol=1e-4
            )


AVERAGES = "copies the model before .* in on_fit_start"


@pytest.mark.parametrize(
    "callback, why",
    [
        (StochasticWeightAveraging(1e-2), AVERAGES),
        (WeightAveraging(), AVERAGES),
        (EMAWeightAveraging(), AVERAGES),
        # lightning_cells.py does what this message and the one below recommend.
        (ModelPruning("l1_unstructured"), "would prune each rank's shards .* before trainer.fit"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_replace_parameters_are_refused(callback, why):
    with pytest.raises(MisconfigurationException, match=f"{type(callback).__name__} {why}"):
        callback.setup(L.Trainer(strategy=strategy(), logger=False), Words(), "fit")
    callback.setup(L.Trainer(accelerator="cpu", devices=1, logger=False), Words(), "fit")


@pytest.mark.parametrize("tune", [Tuner.lr_find, Tuner.scale_batch_size])
def test_a_tuner_outside_of_ranks_is_refused(tune, tmp_path):
    trainer = L.Trainer(strategy=strategy(), logger=False, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"Call it inside xla_fsdp\.launch"):
        tune(Tuner(trainer), Words(), loader(1))


# -- resuming, on another number of ranks ------------------------------------------------------


def resuming(rank, folder, from_plain):
    """On one rank what two have saved, in a file and in a folder; and what is evaluated."""
    last = folder / "sharded" / "last.ckpt"
    trainer = trainer_for(folder / "unused", strategy())
    model = Words()
    tested = trainer.test(model, loader(1), ckpt_path=str(last), weights_only=False, verbose=False)
    predicted = torch.cat(trainer.predict(model, loader(1)))
    return {
        "norm": ours(folder / "a", ckpt_path=folder / "full/epoch=0.ckpt", told=CLIPPED),
        "value": ours(folder / "b", ckpt_path=folder / "sharded/epoch=0.ckpt", told=BY_VALUE),
        "plain": ours(folder / "c", ckpt_path=from_plain, told=CLIPPED),
        "bf16": in_bfloat16(folder / "bf16"),
        "tested": tested,
        "predicted": predicted,
    }


def in_bfloat16(folder):
    seen = set()

    def look(module, given, made):
        seen.add(made.dtype)

    model = Words()
    model.blocks[0].inner.register_forward_hook(look)
    found = ours(folder, model, told=BY_VALUE | SHORT | {"precision": "bf16-mixed"})
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return found["losses"]


def test_another_number_of_ranks_and_plain_lightning_go_on(run_ranks, reference, folder):
    saved = folder / "2"
    from_plain = folder / "norm" / "epoch=0.ckpt"
    (found,) = run_ranks(resuming, 1, saved, from_plain, timeout=TIMEOUT)
    assert_alike(found["norm"], reference["norm"])
    assert_alike(found["plain"], reference["norm"])
    assert_alike(found["value"], reference["value"])
    # Logged in float32 though computed in bfloat16: near, and not of eight bits.
    assert found["bf16"] == pytest.approx(reference["value"]["losses"][:2], abs=2e-2)
    assert found["bf16"] != torch.tensor(found["bf16"]).bfloat16().tolist()
    wanted = reference["value"]["seen"]
    assert found["tested"] == [
        pytest.approx({n: wanted[n] for n in ("val_loss", "accuracy")}, abs=1e-4)
    ]
    # The file is one of plain Lightning.
    assert_alike(
        plain(folder / "c", ckpt_path=saved / "full/epoch=0.ckpt", **CLIPPED), reference["norm"]
    )
    model = Words.load_from_checkpoint(saved / "full/last.ckpt", weights_only=False)
    for name, value in reference["norm"]["weights"].items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-4)
    # The folder becomes one.
    whole = folder / "whole.pth"
    consolidate(["--ckpt_prefix", str(saved / "sharded/last.ckpt"), "--save_path", str(whole)])
    model.load_state_dict(torch.load(whole)["model"])
    with torch.no_grad():
        torch.testing.assert_close(
            found["predicted"], model(rows().tensors[0]), rtol=1e-4, atol=1e-4
        )


# -- Fabric ------------------------------------------------------------------------------------


def train_with(fabric, ranks, micro=1, saved=None):
    """As Fabric's documentation has it, the optimizer made first; ``saved`` after two batches."""
    model = Words()
    optimizer = model.configure_optimizers()[0][0]
    data = fabric.setup_dataloaders(loader(ranks), use_distributed_sampler=False)
    wrapped, optimizer = fabric.setup(model, optimizer)
    found = []
    for index, (words, labels) in enumerate(data):
        stepping = (index + 1) % micro == 0
        with fabric.no_backward_sync(wrapped, enabled=not stepping):
            loss = torch.nn.functional.cross_entropy(wrapped(words), labels)
            fabric.backward(loss / micro)
        found.append(loss.detach())
        if stepping:
            norm = fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            found.append(norm)
        if index == 1 and saved is not None:
            state = {"model": wrapped, "optimizer": optimizer, "seen": index}
            fabric.save(saved, state)
    return wrapped, optimizer, [fabric.all_reduce(one).item() for one in found]


def fabric_on_ranks(rank, folder):
    ranks, device = xr.world_size(), f"xla:{rank}"
    found = {}
    for kind in ("sharded", "full"):
        told = {"auto_wrap_policy": {Block}, "state_dict_type": kind}
        fabric = L.Fabric(strategy=FabricStrategy(**told))
        fabric.launch()
        where = folder / kind
        wrapped, optimizer, seen = train_with(fabric, ranks, 2 if kind == "full" else 1, where)
        found[kind] = seen, full_state_dict(wrapped._forward_module)
        if kind == "full":
            found["state"] = optimizer.state_dict()
        # Into a model of its own: what was saved is of after two batches.
        other = Words()
        with torch.no_grad():
            other.head.weight.zero_()
        other, tuned = fabric.setup(other, torch.optim.AdamW(other.parameters(), lr=1.0))
        tuned = fabric.setup_optimizers(other.module.configure_optimizers()[0][0])
        state = {"model": other, "optimizer": tuned, "seen": None}
        assert fabric.load(where, state, weights_only=False) == {}
        assert state["seen"] == 1
        found[kind + " loaded"] = full_state_dict(other._forward_module)
        lr = {group["weight_decay"]: group["lr"] for group in tuned.optimizer.param_groups}
        assert lr == {0.2: 3e-2, 0.0: 3e-2}
        assert all(state["step"] > 0 for state in tuned.optimizer.state.values())
    mine = torch.full((2,), float(rank), device="xla", requires_grad=True)
    gathered = fabric.all_gather(mine, sync_grads=True)
    (gathered * torch.arange(ranks).to("xla")[:, None]).sum().backward()
    before = DeviceRandomState.read()
    found["talk"] = [
        fabric.all_gather({"a": mine})["a"].tolist(),
        mine.grad.tolist(),
        [fabric.all_reduce(mine, reduce_op=op).tolist() for op in ("sum", "mean", "max", "min")],
        fabric.broadcast({"from": rank, "at": mine.detach()}, src=1)["from"],
        fabric.strategy.reduce_boolean_decision(rank == 0, all=False),
        fabric.strategy.reduce_boolean_decision(rank == 0),
    ]
    fabric.barrier()
    assert DeviceRandomState.read() == before
    order = folder / "order"
    with fabric.rank_zero_first():
        if rank == 0:
            order.write_text("first")
        assert order.read_text() == "first"
    with pytest.raises(ValueError, match="process groups"):
        fabric.all_reduce(mine, group="some")
    with pytest.raises(ValueError, match="num_workers=1 would fork this process"):
        fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(), num_workers=1))
    with pytest.raises(ValueError, match=f"but {ranks} ranks are running already"):
        L.Fabric(strategy=NAME, devices=3)
    with pytest.raises((ValueError, OtherRankError), match="is a folder, but with state_dict_type"):
        fabric.save(folder / "sharded", {"model": other})
    assert fabric.device == torch.device(device) or ranks == 1
    return found


@pytest.mark.slow
def test_fabric_is_that_of_one_process(run_ranks, tmp_path):
    found = run_ranks(fabric_on_ranks, 2, tmp_path, timeout=TIMEOUT)
    for kind, micro in (("sharded", 1), ("full", 2)):
        one = L.Fabric(accelerator="cpu", devices=1)
        model, optimizer, seen = train_with(one, 1, micro, tmp_path / f"plain {kind}")
        torch.testing.assert_close(found[0][kind][0], seen, rtol=1e-5, atol=1e-5)
        at_two = torch.load(tmp_path / f"plain {kind}")["model"]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[0][kind][1][name], value, rtol=1e-4, atol=1e-4)
            loaded = found[0][f"{kind} loaded"][name]
            torch.testing.assert_close(loaded, at_two[name], rtol=1e-4, atol=1e-4)
    # One file, of which a plain optimizer takes its part.
    optimizer.load_state_dict(found[0]["state"])
    assert torch.load(tmp_path / "full")["model"].keys() == model.state_dict().keys()
    for rank, one in enumerate(found):
        rows_of = [[float(r)] * 2 for r in range(2)]
        reduced = [[1.0] * 2, [0.5] * 2, [1.0] * 2, [0.0] * 2]
        assert one["talk"] == [rows_of, [2.0 * rank] * 2, reduced, 1, True, False]


# -- a Trainer outside of ranks, and what is refused -------------------------------------------


@pytest.mark.slow
def test_the_page_s_script_starts_its_ranks(run_script, tmp_path):
    page = (ROOT / "docs/how-to/lightning.md").read_text()
    (script,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.DOTALL)
    told = {"cwd": tmp_path, "env": {"CPU_NUM_DEVICES": "2"}}
    done = run_script(script, 1, **told)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"^loss (.*)$", done.stdout, re.MULTILINE)[1]) < 0.3
    assert done.stdout.count("loss ") == 1
    whole = tmp_path / "whole.safetensors"
    saved = tmp_path / "runs/lightning/last.ckpt"
    consolidate(["--ckpt_prefix", str(saved), "--save_path", str(whole)])
    names = load_file(whole)
    assert len(names) == 12 and names["net.1.layers.1.weight"].shape == (32, 32)


ARGUMENTS = [
    (dict(layers=[Block]), "has no option 'layers', .* auto_wrap_policy"),
    (dict(state_dict_type="local"), "'full' or"),
    (dict(auto_wrap_policy="Block"), "must be a set of classes"),
    (dict(auto_wrap_policy={"Block"}), "must be a set of classes"),
    (dict(activation_checkpointing_policy=print), "must be a set of classes"),
]
ON_XLA = [
    (dict(precision="16-mixed"), "Use 'bf16-mixed'"),
    (dict(precision="64-true"), "32-true, bf16-mixed, bf16-true"),
    (dict(accelerator="gpu"), "Leave accelerator out"),
    (dict(devices=9), "must be 'auto' or 1 to 8"),
]


def test_wrong_arguments_are_refused():
    for kind in (TrainerStrategy, FabricStrategy):
        for wrong, told in ARGUMENTS:
            with pytest.raises((ValueError, TypeError), match=told):
                kind(**wrong)
    for kind in (L.Trainer, L.Fabric):
        for wrong, told in ON_XLA:
            with pytest.raises(ValueError, match=told):
                kind(strategy=NAME, **wrong)


def test_layers_and_parameters_that_nothing_would_shard_are_refused():
    settings = TrainerStrategy(auto_wrap_policy={torch.nn.LSTM}).settings
    with pytest.raises(ValueError, match="no module in Words is of class LSTM; it has Block"):
        settings.require_classes(Words())
    with pytest.raises(ValueError, match="bias would not be sharded: with manual optimization"):
        settings.wrap_children(Words(), "32-true")
    with pytest.raises(ValueError, match="has no parameter of a model that was set up"):
        adopt(torch.optim.SGD(Words().parameters(), lr=0.1))


def partly_wrapped(rank):
    settings = TrainerStrategy(
        auto_wrap_policy={torch.nn.Linear}, activation_checkpointing_policy={torch.nn.Linear}
    ).settings
    inner = XlaFullyShardedDataParallel(torch.nn.Linear(2, 2))
    with every_rank_warns(rank, "auto_wrap_policy is ignored"):
        model = settings.wrap(torch.nn.Sequential(inner, torch.nn.Linear(2, 2)), "32-true")
    assert XlaFullyShardedDataParallel.fsdp_modules(model) == [model, inner]


def test_a_policy_is_ignored_where_layers_are_wrapped(run_ranks):
    run_ranks(partly_wrapped, 2)


def test_the_drop_in_and_its_undoing():
    theirs = L.fabric.strategies.XLAFSDPStrategy
    assert STRATEGY_REGISTRY["xla_fsdp"]["strategy"] is theirs
    try:
        integration.install_drop_in()
        assert L.fabric.strategies.XLAFSDPStrategy is FabricStrategy
        assert type(L.Fabric(strategy="xla_fsdp", devices=2).strategy) is FabricStrategy
        assert type(L.Trainer(strategy="xla_fsdp", logger=False).strategy) is TrainerStrategy
    finally:
        integration.uninstall()
    assert L.fabric.strategies.XLAFSDPStrategy is theirs
    assert STRATEGY_REGISTRY["xla_fsdp"]["strategy"] is theirs
    assert NAME not in STRATEGY_REGISTRY and rank_zero_only.rank == 0
    assert type(rank_zero_only.rank) is int
    assert "xla_fsdp" not in grad_norm.__code__.co_filename
    integration.install()
    assert NAME in STRATEGY_REGISTRY


class Trimmed(Words):
    """Says itself what is saved of it: no frozen bias, and the head in half precision."""

    def __init__(self):
        super().__init__()
        self.bias.requires_grad_(False)
        self.head.register_state_dict_post_hook(half_weight)

    def state_dict(self, *args, **kwargs):
        own = super().state_dict(*args, **kwargs)
        return {name: value for name, value in own.items() if name != "bias"}

    def load_state_dict(self, state_dict, *args, **kwargs):
        return super().load_state_dict({**state_dict, "bias": torch.zeros(3)}, *args, **kwargs)


def half_weight(module, state, prefix, metadata):
    state[prefix + "weight"] = state[prefix + "weight"].half()


def trimmed_on_ranks(rank, folder):
    trainer = trainer_for(folder, strategy(), **SHORT)
    fit(trainer, xr.world_size(), Trimmed())
    again = trainer_for(folder / "again", strategy(), **{**SHORT, "max_epochs": 2})
    return fit(again, xr.world_size(), Trimmed(), folder / "last.ckpt")[0]["losses"]


@pytest.mark.slow
def test_a_module_that_says_what_is_saved_of_it(run_ranks, tmp_path):
    expected = trainer_for(tmp_path / "plain", devices=1, **SHORT)
    fit(expected, model=Trimmed())
    losses = run_ranks(trimmed_on_ranks, 2, tmp_path / "ranks", timeout=TIMEOUT)
    states = [
        torch.load(tmp_path / name / "last.ckpt", weights_only=False)["state_dict"]
        for name in ("plain", "ranks")
    ]
    assert list(states[0]) == list(states[1]) and "bias" not in states[0]
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert one.dtype is other.dtype and torch.allclose(one, other, atol=1e-3)
    again = trainer_for(tmp_path / "on", devices=1, **{**SHORT, "max_epochs": 2})
    found, _ = fit(again, model=Trimmed(), ckpt_path=tmp_path / "plain" / "last.ckpt")
    assert losses[0] == pytest.approx(found["losses"], abs=1e-3)
