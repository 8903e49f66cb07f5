"""Small models for Lightning, their data, and how a Trainer trains them; imported before ranks are.

``import lightning`` is not safe from several threads at once.
"""

import lightning as L
import torch
import torch.nn.functional as F
import torch_xla.runtime as xr
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import nn

import xla_fsdp.integrations.lightning as ours

BATCH = 8  # of all ranks together
ROWS = 32
WORDS = 12
WIDTH = 32  # all ranks have a part of the matrices
CLIP = 0.2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Words(L.LightningModule):
    """Which of the words it is; an optimizer with two groups, a schedule by steps."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 3)
        self.bias = nn.Parameter(torch.zeros(3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.norms = []

    def forward(self, words):
        return self.head(self.blocks(self.embedding(words)).mean(1)) + self.bias

    def training_step(self, batch, index):
        words, labels = batch
        loss = F.cross_entropy(self(words), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        words, labels = batch
        logits = self(words)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, index):
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(grad_norm(self, 2)["grad_2.0_norm_total"])

    def configure_optimizers(self):
        assert "blocks.0.inner.weight" in dict(self.named_parameters())
        assert "0.inner.weight" in dict(self.blocks.named_parameters())
        decayed = [p for n, p in self.named_parameters() if n.endswith("weight")]
        others = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-2, weight_decay=0.2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def rows(number=ROWS):
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(WORDS, (number, 4), generator=generator)
    return torch.utils.data.TensorDataset(words, words.sum(1) % 3)


def loader(ranks, number=ROWS):
    """In order: the sampler that Lightning puts in shuffles."""
    data, sampler = rows(number), None
    if ranks > 1:
        place = {"num_replicas": ranks, "rank": xr.global_ordinal()}
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False, **place)
    return torch.utils.data.DataLoader(data, batch_size=BATCH // ranks, sampler=sampler)


class Losses(Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, *args):
        self.found.append(trainer.callback_metrics["loss_step"].item())


def trainer_for(strategy="auto", told=(), **options):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"num_sanity_val_steps": 0, "accelerator": "cpu", "devices": "auto"}
    return L.Trainer(strategy=strategy, callbacks=[Losses(), *told], **(quiet | options))


def kept(folder):
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)


def fit(trainer, ranks=1, model=None, ckpt_path=None):
    model = model or Words()
    trainer.fit(model, loader(ranks), loader(ranks), ckpt_path=ckpt_path, weights_only=False)
    seen = {k: v.item() for k, v in trainer.callback_metrics.items()}
    norms = [norm.item() for norm in getattr(model, "norms", ())]
    (losses,) = (each.found for each in trainer.callbacks if isinstance(each, Losses))
    return {"losses": losses, "norms": norms, "seen": seen}, model


def strategy(**options):
    return ours.TrainerStrategy(auto_wrap_policy={Block}, **options)
