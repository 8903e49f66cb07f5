"""Training runs that are saved and resumed: what the tests of checkpoints have in common."""

from __future__ import annotations

import functools
import itertools

import torch
import torch_xla
import torch_xla.runtime as xr
from safetensors.torch import save_file
from zoo import Zoo, batches, loss_of

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import fully_shard

WRAPPINGS = ("none", "root", "nested", "flat", "rows", "in place")


def wrapped(kind: str, model: torch.nn.Module, **options) -> torch.nn.Module:
    if kind == "none":
        model = model.to("xla")
        model.tie()
        return model
    if kind == "nested":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = FSDP(block, **options)
    if kind == "in place":
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    cut = {"flatten_parameters": kind == "flat", "shard_param_on_dim_0": kind == "rows"}
    return FSDP(model, **cut, **options)


adam = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
averaged = functools.partial(torch.optim.ASGD, lr=1e-2)
nesterov = functools.partial(torch.optim.NAdam, lr=1e-2)
heavy_ball = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


class Run:
    def __init__(self, kind: str, rank: int, size: int, seed: int = 0, optimizer=adam, **options):
        torch.manual_seed(seed)
        self.model = wrapped(kind, Zoo(), **options)
        self.kind, self.rank, self.size = kind, rank, size
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer(trained)
        schedules = torch.optim.lr_scheduler
        self.scheduler = schedules.SequentialLR(
            self.optimizer,
            [
                schedules.LinearLR(self.optimizer, start_factor=0.1, total_iters=2),
                schedules.MultiStepLR(self.optimizer, milestones=[1, 1, 3]),
            ],
            milestones=[2],
        )

    def train(self, begin: int, end: int) -> list[float]:
        """Steps ``begin .. end``; the losses of the whole batch."""
        import torch_xla.core.xla_model as xm

        losses = []
        for tokens in batches(end)[begin:]:
            each = tokens.shape[0] // self.size
            mine = tokens[self.rank * each : (self.rank + 1) * each].to("xla")
            loss = loss_of(self.model(mine), mine)
            loss.backward()
            if self.kind == "none" and self.size > 1:
                for parameter in self.model.parameters():
                    if parameter.grad is not None and parameter.numel():
                        parameter.grad = xm.all_reduce(
                            xm.REDUCE_SUM, parameter.grad, scale=1 / self.size
                        )
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            torch_xla.sync()
            losses.append(xm.mesh_reduce("loss", loss.item(), sum) / self.size)
        return losses

    def save(self, path, step: int, **options) -> str:
        return xla_fsdp.save_checkpoint(
            path, self.model, self.optimizer, self.scheduler, step=step, **options
        )

    def load(self, path, **options):
        return xla_fsdp.load_checkpoint(path, self.model, self.optimizer, self.scheduler, **options)


def saves_and_loads(model, optimizer, folder):
    """Every way to save, and every way to load what this call saves, by name, for all ranks."""
    both, load = (model, optimizer), xla_fsdp.load_checkpoint
    full = xla_fsdp.full_state_dict(model, rank0_only=False)
    optim = xla_fsdp.full_optim_state_dict(*both, rank0_only=False)
    saved = xla_fsdp.save_checkpoint(f"{folder}/saved", *both, step=1)
    xla_fsdp.to_dcp(f"{folder}/dcp", *both)
    rank, numbers = xr.global_ordinal(), itertools.count()
    if rank == 0:
        torch.save(full, f"{folder}/weights.pth")
        save_file(full, f"{folder}/weights.safetensors")
    of_rank_0 = full if rank == 0 else None

    def new():  # a folder that one call alone writes to
        return f"{folder}/{next(numbers)}"

    def save_beside():
        with xla_fsdp.AsyncCheckpointer(new()) as checkpointer:
            checkpointer.save(*both, step=1)
            checkpointer.wait()

    def keep_in_memory():
        here = {"fast": f"{new()}-{rank}", "host": f"{rank}", "address": "127.0.0.1"}
        with xla_fsdp.TieredCheckpointer(new(), **here) as tiers:
            tiers.save(*both, step=1, durable=True)
            tiers.wait()
            tiers.load(*both, restore_rng=False)

    return {
        "full_state_dict": lambda: xla_fsdp.full_state_dict(model),
        "full_optim_state_dict": lambda: xla_fsdp.full_optim_state_dict(*both),
        "save_checkpoint": lambda: xla_fsdp.save_checkpoint(new(), *both, step=1),
        "to_dcp": lambda: xla_fsdp.to_dcp(new(), *both),
        "AsyncCheckpointer": save_beside,
        "TieredCheckpointer": keep_in_memory,
    }, {
        "load_full_state_dict": lambda: xla_fsdp.load_full_state_dict(model, of_rank_0),
        "load_full_optim_state_dict": lambda: xla_fsdp.load_full_optim_state_dict(*both, optim),
        "load_checkpoint": lambda: load(saved, *both, restore_rng=False),
        "load_checkpoint, of nothing": lambda: load(f"{folder}/none", model, missing_ok=True),
        "from_dcp": lambda: xla_fsdp.from_dcp(f"{folder}/dcp", *both, allow_pickle=True),
        "a torch file": lambda: xla_fsdp.load_weights(model, f"{folder}/weights.pth"),
        "safetensors": lambda: xla_fsdp.load_weights(model, f"{folder}/weights.safetensors"),
    }
