"""What a Trainer saves of a sharded model, and loads again on any number of ranks.

A folder ``checkpoint-N`` has what ``from_pretrained`` reads (whole weights, configuration) and, in
``xla_fsdp/``, a checkpoint of this package with model, optimizer and scheduler.
"""

from __future__ import annotations

import os
import random
import warnings
import zlib
from typing import Any

import numpy
import torch
import torch_xla.core.xla_model as xm
import transformers.trainer
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..checkpoint.full_optimizer import load_full_optim_state_dict
from ..checkpoint.full_state import full_state_dict
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.meeting import Meeting
from ..checkpoint.saving import save_checkpoint

FOLDER = "xla_fsdp"


def save_whole(trainer: Trainer, folder: str) -> None:
    """``Trainer.save_model``: the first rank writes whole weights as ``save_pretrained`` does."""
    state = full_state_dict(trainer.model)

    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        torch.save(trainer.args, os.path.join(folder, TRAINING_ARGS_NAME))
        model = trainer.accelerator.unwrap_model(trainer.model)
        safe = trainer.args.save_safetensors
        if isinstance(model, PreTrainedModel):
            model.save_pretrained(folder, state_dict=state, safe_serialization=safe)
        elif safe:
            from accelerate.utils import clean_state_dict_for_safetensors
            from safetensors.torch import save_file

            whole = clean_state_dict_for_safetensors(state)
            save_file(whole, os.path.join(folder, SAFE_WEIGHTS_NAME), metadata={"format": "pt"})
        else:
            torch.save(state, os.path.join(folder, WEIGHTS_NAME))
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)

    Meeting().first("save the model", write)


def save_training(trainer: Trainer, folder: str) -> None:
    """Model, optimizer and scheduler, for any number of ranks."""
    save_checkpoint(
        os.path.join(folder, FOLDER),
        trainer.model,
        _plain(trainer.optimizer),
        trainer.lr_scheduler,
        step=trainer.state.global_step,
    )


def load_training(trainer: Trainer, folder: str) -> None:
    """What :func:`save_training` saved; or what a Trainer without sharding did.

    Raises:
        ValueError: the folder is of torch_xla's own FSDP.
        CheckpointError: it is damaged, or does not fit.
    """
    optimizer, scheduler = _plain(trainer.optimizer), trainer.lr_scheduler
    ours = os.path.join(folder, FOLDER)
    meeting = Meeting()
    there = meeting.first("look at the checkpoint", lambda: sorted(os.listdir(folder)))
    if FOLDER in there:
        load_checkpoint(ours, trainer.model, optimizer, scheduler, restore_rng=False)
        return
    if any(name.startswith("rank0-of-") and name.endswith("-optimizer.pt") for name in there):
        raise ValueError(
            f"{folder} has the optimizer of torch_xla's own FSDP, a shard of a vector for each of "
            "its ranks, which can not be taken over: remove its rank*-optimizer.pt to resume with "
            "the model alone and a new optimizer"
        )
    if not {"optimizer.pt", "scheduler.pt"} <= set(there):
        warnings.warn(
            f"{folder} has no state of the optimizer and of the scheduler (save_only_model?): they "
            "start anew",
            stacklevel=2,
        )
        return

    def read(name: str) -> Any:
        return torch.load(os.path.join(folder, name), map_location="cpu", weights_only=True)

    state = meeting.each("read the optimizer", lambda: read("optimizer.pt"))
    load_full_optim_state_dict(trainer.model, optimizer, state)
    meeting.together("load the scheduler", lambda: scheduler.load_state_dict(read("scheduler.pt")))


def load_random_state(trainer: Trainer, folder: str) -> None:
    """The random states of Python, numpy, torch and XLA as this rank saved them.

    On another number of ranks: Python's and numpy's of the first rank, and for torch and XLA seeds
    that follow from its state and the number of the rank, so that two resumptions draw the same.
    """
    saved, rank = ranks_that_saved(folder), trainer.args.process_index
    if not saved:
        return
    same = saved == trainer.args.world_size
    own = rank if same else 0
    name = "rng_state.pth" if saved == 1 else f"rng_state_{own}.pth"
    with transformers.trainer.safe_globals():
        state = torch.load(os.path.join(folder, name))
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    if same:
        torch.random.set_rng_state(state["cpu"])
        xm.set_rng_state(state["xla"])
    else:
        torch.manual_seed(_seed(state["cpu"].numpy().tobytes(), rank))
        xm.set_rng_state(_seed(str(state["xla"]).encode(), rank))


def ranks_that_saved(folder: str) -> int:
    """How many ranks have saved their random states in a checkpoint's folder."""
    return sum(1 for name in os.listdir(folder) if name.startswith("rng_state"))


def _seed(state: bytes, rank: int) -> int:
    return zlib.crc32(state) + rank


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without Accelerate around it."""
    return getattr(optimizer, "optimizer", optimizer)
