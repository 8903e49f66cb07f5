"""What a Trainer saves of a sharded model, and loads again on any number of ranks.

A folder ``checkpoint-N`` has what ``from_pretrained`` reads (full weights or adapters, and the
configuration), in ``xla_fsdp/`` a checkpoint of this package with model, optimizer and scheduler,
and in ``xla_fsdp_ranks.json`` how many ranks saved it.
"""

from __future__ import annotations

import glob
import json
import os
import random
import shutil
import warnings
import zlib
from typing import Any

import numpy
import torch
import torch_xla.core.xla_model as xm
import transformers.trainer
from accelerate.utils import clean_state_dict_for_safetensors
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINING_ARGS_NAME, _is_peft_model
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..checkpoint.full_optimizer import load_full_optim_state_dict
from ..checkpoint.full_state import full_state_dict
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.meeting import Meeting
from ..checkpoint.saving import save_checkpoint
from ..checkpoint.weights import load_weights
from ..consolidate.format.reader import ShardedCheckpoint

FOLDER = "xla_fsdp"
RANKS = "xla_fsdp_ranks.json"


def save_whole(trainer: Trainer, folder: str) -> None:
    """``Trainer.save_model``: the first rank writes what a Trainer in one process writes.

    Full weights and the configuration; of a model with adapters of peft, these and their
    configuration; of another module its ``state_dict()``. Then the tokenizer and the arguments.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    safe = getattr(trainer.args, "save_safetensors", True)  # always, since 5
    state: dict[str, Any] = {}
    knows_shards = isinstance(model, PreTrainedModel) or _is_peft_model(model)
    if knows_shards:
        model.save_pretrained(folder, **({} if safe else {"safe_serialization": False}))
    else:
        state = full_state_dict(trainer.model)

    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        torch.save(trainer.args, os.path.join(folder, TRAINING_ARGS_NAME))
        if not knows_shards and safe:
            whole = clean_state_dict_for_safetensors(state)
            save_file(whole, os.path.join(folder, SAFE_WEIGHTS_NAME), metadata={"format": "pt"})
        elif not knows_shards:
            torch.save(state, os.path.join(folder, WEIGHTS_NAME))
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    Meeting().first("save the model", write)


def load_whole(trainer: Trainer, model: nn.Module, folder: str) -> None:
    """Loads what :func:`save_whole` wrote into a sharded ``model``; must be called on every rank.

    Raises:
        CheckpointError: the weights are damaged, or do not fit.
        ValueError: the adapters do not fit.
    """
    inner: Any = trainer.accelerator.unwrap_model(model)
    if not _is_peft_model(inner):
        load_weights(model, folder)
        return
    for adapter in inner.peft_config:
        inner.load_adapter(os.path.join(folder, "" if adapter == "default" else adapter), adapter)


def save_training(trainer: Trainer, folder: str) -> None:
    """Model, optimizer and scheduler, for any number of ranks."""
    save_checkpoint(
        os.path.join(folder, FOLDER),
        trainer.model,
        _plain(trainer.optimizer),
        trainer.lr_scheduler,
        step=trainer.state.global_step,
    )


def record_ranks(trainer: Trainer, folder: str) -> None:
    """Writes how many ranks save a checkpoint, sharded or not, into its ``folder``."""
    if trainer.args.should_save:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, RANKS), "w") as file:
            json.dump({"world_size": trainer.args.world_size}, file)


def remove_training(folder: str) -> None:
    """Removes what an earlier run saved beside the model in a checkpoint's folder; must be called
    on every rank. Otherwise resuming would load that run's optimizer and model."""

    def remove() -> None:
        shutil.rmtree(os.path.join(folder, FOLDER), ignore_errors=True)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state*.pth"):
            for path in glob.glob(os.path.join(glob.escape(folder), name)):
                os.remove(path)

    Meeting().first("remove what another run saved", remove)


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
    Warns of what the checkpoint lacks.
    """
    saved, rank = _ranks_that_saved(folder), trainer.args.process_index
    same = saved == trainer.args.world_size
    name = "rng_state.pth" if saved == 1 else f"rng_state_{rank if same else 0}.pth"
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        warnings.warn(
            f"{folder} has no random state ({name}). Random numbers, such as those of dropout, "
            "follow from the seed in the arguments and differ from those of an uninterrupted run",
            stacklevel=2,
        )
        return
    with transformers.trainer.safe_globals():
        state = torch.load(path)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch_state, xla_state = state["cpu"].numpy().tobytes(), state.get("xla")
    if xla_state is None:
        warnings.warn(
            f"{path} has no random state of XLA, because it was saved without torch_xla. Random "
            "numbers on the device follow from the random state of torch in it and differ from "
            "those of an uninterrupted run",
            stacklevel=2,
        )
    if same:
        torch.random.set_rng_state(state["cpu"])
    else:
        torch.manual_seed(_seed(torch_state, rank))
    if xla_state is None:
        xm.set_rng_state(_seed(torch_state, rank))
    elif same:
        xm.set_rng_state(xla_state)
    else:
        xm.set_rng_state(_seed(str(xla_state).encode(), rank))


def _ranks_that_saved(folder: str) -> int | None:
    """How many ranks saved a checkpoint; ``None``: several, not recorded.

    :func:`record_ranks` recorded it, unless the checkpoint is of an older version or of a machine
    without this package. Then the manifest of this package tells, and a Trainer without sharding
    writes ``rng_state.pth`` if it is the only process.
    """
    recorded = os.path.join(folder, RANKS)
    if os.path.exists(recorded):
        with open(recorded) as file:
            return int(json.load(file)["world_size"])
    ours = os.path.join(folder, FOLDER)
    if os.path.isdir(ours):
        return ShardedCheckpoint(ours).manifest.world_size
    return 1 if os.path.exists(os.path.join(folder, "rng_state.pth")) else None


def _seed(state: bytes, rank: int) -> int:
    return zlib.crc32(state) + rank


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without Accelerate around it."""
    return getattr(optimizer, "optimizer", optimizer)
