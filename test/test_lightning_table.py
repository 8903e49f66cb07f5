"""What people combine in Lightning, against plain Lightning in one process.

The docstrings of the cells are in docs/reference/tested-combinations.md. A cell trains a few steps
and returns what it saw. It is called once with a :class:`Side` of plain Lightning, and once on each
rank.
"""

import copy
import csv
import re

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_xla.runtime as xr
from conftest import ROOT
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning_models import CLIP, WIDTH, WORDS, Block, Words, fit, loader, strategy, trainer_for
from torch import nn
from torch.optim import swa_utils

from xla_fsdp import full_state_dict
from xla_fsdp.integrations.lightning import FabricStrategy
from xla_fsdp.testing import run_in_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

STEPS = {"max_epochs": 1, "limit_train_batches": 2}
RANKS = 2


class Tagger(Words):
    """A backbone and a head. On several ranks most biases are padding in all shards but one."""

    def __init__(self, lr=1e-2):
        L.LightningModule.__init__(self)
        torch.manual_seed(3)
        self.lr = lr
        self.backbone = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words):
        return self.head(self.backbone(words).mean(1))

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=self.lr, eps=1e-2)  # not the sign of what is rounded


class Scheduled(Tagger):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Normed(Tagger):
    def __init__(self):
        super().__init__()
        self.backbone[1].norm = nn.BatchNorm1d(4)  # words


class Toggled(Tagger):
    """Two optimizers in turn, the other's parameters frozen meanwhile; the head in a list, which
    has no forward."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.head = nn.ModuleList([Block(WIDTH), self.head])

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            outputs = self.head[1](self.head[0](self.backbone(batch[0])).mean(1))
            loss = F.cross_entropy(outputs, batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=CLIP)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)

    def validation_step(self, *batch):
        pass

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.backbone, self.head)]


class Averaged(Tagger):
    def on_fit_start(self):
        average, block = swa_utils.get_ema_multi_avg_fn(0.5), self.backbone[1]
        self.averages = [swa_utils.AveragedModel(block, multi_avg_fn=average)]

    def on_train_batch_end(self, *args):
        self.averages[0].update_parameters(self.backbone[1])

    def on_save_checkpoint(self, checkpoint):
        named = self.averages[0].module.named_parameters()
        checkpoint["average"] = {name: value.detach() for name, value in named}


class Trimmed(Tagger):
    """Says itself what is saved of it: no frozen bias, and the head in half precision."""

    def __init__(self):
        super().__init__()
        self.head.bias.requires_grad_(False)
        self.head.register_state_dict_post_hook(half_weight)

    def state_dict(self, *args, **kwargs):
        own = super().state_dict(*args, **kwargs)
        return {name: value for name, value in own.items() if name != "head.bias"}

    def load_state_dict(self, state_dict, *args, **kwargs):
        return super().load_state_dict({**state_dict, "head.bias": torch.zeros(3)}, *args, **kwargs)


def half_weight(module, state, prefix, metadata):
    state[prefix + "weight"] = state[prefix + "weight"].half()


class Finetuning(callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=1e-2)


class Side:
    """Plain Lightning in one process (``ranks`` is 0), or ours on one of ``ranks`` ranks."""

    def __init__(self, folder, ranks):
        self.ranks = ranks
        self.folder = folder / str(ranks)

    @property
    def loader(self):
        return loader(self.ranks or 1)

    def trainer(self, *told, state="full", **options):
        ours = strategy(state_dict_type=state) if self.ranks else "auto"
        where = {"devices": "auto" if self.ranks else 1, "default_root_dir": self.folder}
        kept = any(isinstance(each, callbacks.ModelCheckpoint) for each in told)
        return trainer_for(ours, told, enable_checkpointing=kept, **(where | options))

    def fit(self, trainer, model=None, **options):
        found, model = fit(trainer, self.ranks or 1, model or Tagger(), **options)
        return {
            "losses": found["losses"],
            "weights": self.weights(trainer, model),
            "step": trainer.global_step,
        }

    def weights(self, trainer, model):
        if self.ranks:
            return full_state_dict(trainer.strategy.model)
        return copy.deepcopy(model.state_dict())


def best_and_last(side):
    """`ModelCheckpoint`: the best of three epochs, which is tested, and the last"""
    return {state: with_best_and_last(side, state) for state in ("full", "sharded")}


def with_best_and_last(side, state):
    folder, options = side.folder / f"best-{state}", {"max_epochs": 3, "limit_train_batches": 1}
    kept = callbacks.ModelCheckpoint(folder, "{epoch}", "val_loss", save_last=True, save_top_k=1)
    trainer = side.trainer(kept, state=state, num_sanity_val_steps=1, **options)
    found = side.fit(trainer, Tagger(lr=0.1))
    found["files"] = sorted(path.name for path in folder.iterdir())
    for which in ("best", "last"):
        told = {"ckpt_path": which, "verbose": False, "weights_only": False}
        found[which] = trainer.test(Tagger(), side.loader, **told)[0]["val_loss"]
    return found | {"score": kept.best_model_score.item()}


def saved_and_resumed(side, name, make, make_callbacks=lambda: [], at="epoch=1", **options):
    """Trains, saves in each epoch or step, and trains once more from ``at``."""
    found, unit = {}, at.partition("=")[0]
    every = {"every_n_train_steps": 1} if unit == "step" else {}
    options = {"limit_train_batches": 1, "max_epochs": 3} | options
    for state in ("full", "sharded"):
        folder = side.folder / f"{name}-{state}"
        kept = callbacks.ModelCheckpoint(folder, f"{{{unit}}}", save_top_k=-1, **every)
        trainer = side.trainer(*make_callbacks(), kept, state=state, **options)
        found[state] = side.fit(trainer, make())
        told = make_callbacks()
        again = side.trainer(*told, state=state, **options)
        found[f"{state} again"] = side.fit(again, make(), ckpt_path=folder / f"{at}.ckpt")
        groups = again.optimizers[0].param_groups
        found[f"{state} rates"] = [group["lr"] for group in groups]
        for each in told:
            if isinstance(each, callbacks.EarlyStopping):
                found[f"{state} stopped"] = each.wait_count, each.stopped_epoch
                found[f"{state} best"] = each.best_score.item()
    return found


def bf16_mixed(side):
    """bf16-mixed, with accumulation and a schedule, resumed within an epoch"""
    options = {"limit_train_batches": 4, "max_epochs": 2, "accumulate_grad_batches": 2}
    options["precision"] = "bf16-mixed"
    return saved_and_resumed(side, "bf16", Scheduled, at="step=1", **options)


def early_stopping_resumed(side):
    """`EarlyStopping`, resumed"""

    def stopping():
        return [callbacks.EarlyStopping("val_loss", patience=2)]

    return saved_and_resumed(side, "stopping", lambda: Tagger(lr=0.5), stopping)


def throughput(side):
    """`ThroughputMonitor`, which counts what its own rank has seen, and `DeviceStatsMonitor`"""
    log = CSVLogger(side.folder, name="throughput", version=0)
    monitor = callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)
    told = monitor, callbacks.DeviceStatsMonitor()
    found = side.fit(side.trainer(*told, logger=log, log_every_n_steps=1, **STEPS))
    if xr.global_ordinal() == 0:
        lines = csv.DictReader((side.folder / "throughput/version_0/metrics.csv").open())
        seen = [float(line["train/samples"]) for line in lines if line["train/samples"]]
        found["samples"] = [own * (side.ranks or 1) for own in seen]
    return found


def manual(side):
    """manual optimization with two optimizers and `toggle_optimizer`, resumed"""
    return saved_and_resumed(side, "manual", Toggled)


def finetuning_batch_norm(side):
    """`BaseFinetuning` with `sync_batchnorm=True`"""
    options = {"max_epochs": 3, "limit_train_batches": 1, "sync_batchnorm": side.ranks > 1}
    trainer = side.trainer(Finetuning(), **options)
    found = side.fit(trainer, Normed())
    groups = trainer.optimizers[0].param_groups
    return found | {"groups": [len(group["params"]) for group in groups]}


def finetuning_resumed(side):
    """`BackboneFinetuning`, resumed"""

    def tuning():
        return [callbacks.BackboneFinetuning(1, lambda epoch: 1.5)]

    return saved_and_resumed(side, "tuning", Tagger, tuning)


def tuner(side):
    """`Tuner.lr_find`, which leaves no traces, then `fit`"""
    L.seed_everything(5, verbose=False)
    trainer, model = side.trainer(max_epochs=2), Scheduled(lr=1e-3)
    found = Tuner(trainer).lr_find(
        model, side.loader, num_training=6, min_lr=1e-3, max_lr=1e-1, early_stop_threshold=None
    )
    seen = {"found": found.results, "suggestion": found.suggestion(1), "lr": model.lr}
    seen["restored"] = side.weights(trainer, model)
    seen["state"] = len(trainer.optimizers[0].state)
    seen["random"] = torch.rand(()).item()  # Python's and numpy's generators are shared by ranks
    seen["files"] = [path.name for path in side.folder.glob(".lr_find*")]
    return seen | {"trained": side.fit(trainer, model)}


def rate_finder(side):
    """`LearningRateFinder`, with accumulation"""
    finder = callbacks.LearningRateFinder(
        1e-3, 1e-1, num_training_steps=5, early_stop_threshold=None
    )
    model = Tagger(lr=1e-3)
    trainer = side.trainer(finder, max_epochs=2, accumulate_grad_batches=2)
    found = side.fit(trainer, model)
    return found | {"found": finder.optimal_lr.results, "lr": model.lr}


def pruned_before(side):
    """a module that was pruned before `fit`"""
    model = Tagger()
    nn.utils.prune.l1_unstructured(model.backbone[1].inner, "weight", 0.5)
    kept = callbacks.ModelCheckpoint(side.folder / "pruned", "{epoch}")
    found = side.fit(side.trainer(kept, **STEPS), model)
    saved = torch.load(side.folder / "pruned/epoch=0.ckpt", weights_only=False)
    return found | {"saved": saved["state_dict"]}


def bfloat16(side):
    """bf16-true, with a schedule"""
    return side.fit(side.trainer(precision="bf16-true", **STEPS), Scheduled())


def fabric(side):
    """Fabric, with 32-true and bf16-mixed: accumulation, clipping, `save`, `load`"""
    return {
        f"{precision} {kind}": with_fabric(side, precision, kind)
        for precision, kind in (("32-true", "full"), ("32-true", "sharded"), ("bf16-mixed", "full"))
    }


def with_fabric(side, precision, kind):
    ours = FabricStrategy(auto_wrap_policy={Block}, state_dict_type=kind) if side.ranks else "auto"
    where = {"strategy": ours, "accelerator": "cpu", "devices": "auto" if side.ranks else 1}
    fabric = L.Fabric(precision=precision, **where)
    fabric.launch()
    data = fabric.setup_dataloaders(side.loader, use_distributed_sampler=False)
    path, losses, norms = side.folder / f"fabric-{kind}", [], []

    def made(lr):
        module = Tagger(lr)
        return fabric.setup(module, module.configure_optimizers())

    model, optimizer = made(1e-2)
    for index, (words, labels) in enumerate(data):
        stepping = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not stepping):
            loss = F.cross_entropy(model(words), labels)
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if stepping:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.2).item())
            optimizer.step()
            optimizer.zero_grad()
        if index == 1:
            fabric.save(path, {"model": model, "optimizer": optimizer, "seen": index})
            model, optimizer = made(1.0)
            state = {"model": model, "optimizer": optimizer, "seen": None}
            assert fabric.load(path, state, weights_only=False) == {}
    module = model._forward_module
    found = {"losses": losses, "norms": norms, "seen": state["seen"]}
    found["weights"] = full_state_dict(module) if side.ranks else dict(module.state_dict())
    if kind == "full":
        plain, state = Tagger().configure_optimizers(), optimizer.state_dict()
        if state:  # of the first rank
            plain.load_state_dict(state)
        found |= {"file": torch.load(path)["model"], "state": plain.state_dict()["state"]}
    return found


def averaged(side):
    """a module that averages its weights"""
    saved = {}
    for state in ("full", "sharded"):
        kept = callbacks.ModelCheckpoint(side.folder / f"averaged-{state}", "{epoch}")
        trainer, model = side.trainer(kept, state=state, **STEPS), Averaged()
        found = side.fit(trainer, model)
        checkpoint = trainer.strategy.load_checkpoint(kept.best_model_path, weights_only=False)
        saved[state] = checkpoint["average"]
    average = model.averages[0].module
    found["average"] = full_state_dict(average) if side.ranks else average.state_dict()
    return found | {"saved": saved}


def trimmed(side):
    """a module with its own `state_dict`, resumed from a file"""
    kept = callbacks.ModelCheckpoint(side.folder / "trimmed", "{epoch}")
    side.fit(side.trainer(kept, **STEPS), Trimmed())
    path = side.folder / "trimmed/epoch=0.ckpt"
    found = side.fit(side.trainer(**(STEPS | {"max_epochs": 2})), Trimmed(), ckpt_path=path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert "head.bias" not in saved and saved["head.weight"].dtype is torch.half
    return {"losses": found["losses"], "saved": saved}


CELLS = [
    best_and_last, early_stopping_resumed, finetuning_resumed, finetuning_batch_norm, tuner,
    rate_finder, throughput, manual, bf16_mixed, bfloat16, averaged, pruned_before, trimmed, fabric,
]  # fmt: skip
NEAR = {"bfloat16": 3e-2, "bf16_mixed": 5e-3, "bf16-mixed full": 5e-3}


@pytest.fixture(scope="module", autouse=True)
def jax_was_imported():
    """jax sets this variable where there is no TPU; Lightning alone then raises TypeError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        yield


def on_ranks(rank, folder):
    side = Side(folder, RANKS)
    return {cell.__name__: cell(side) for cell in CELLS}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What cells found on ranks, all in one launch, by their names."""
    return run_in_ranks(on_ranks, RANKS, tmp_path_factory.mktemp("cells"), timeout=1500)[0]


def test_the_page_lists_all_cells():
    text = (ROOT / "docs/reference/tested-combinations.md").read_text().partition("## Lightning")[2]
    rows = re.findall(r"^\* (.+)$", text, re.MULTILINE)
    assert rows == [cell.__doc__ for cell in CELLS]


def compare(found, wanted, near):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            compare(found[name], value, NEAR.get(name, near))
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    else:
        assert found == pytest.approx(wanted, abs=near)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_cell(found, tmp_path, cell):
    compare(found[cell.__name__], cell(Side(tmp_path, 0)), NEAR.get(cell.__name__, 1e-4))
