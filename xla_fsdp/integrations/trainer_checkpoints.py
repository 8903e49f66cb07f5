"""Checkpoints of the Trainer for sharded models, which any number of ranks can load.

A folder ``checkpoint-N`` contains the files that ``from_pretrained`` reads (full weights or
adapters, and the configuration). ``xla_fsdp/`` in it is a checkpoint of this package with model,
optimizer and scheduler. ``xla_fsdp_ranks.json`` has the number of ranks that saved it.
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

from ..checkpoint.full_state import full_state_dict, load_full_optim_state_dict
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.rank_exchange import RankExchange
from ..checkpoint.saving import save_checkpoint
from ..checkpoint.weights import load_weights
from ..consolidate.format.reader import ShardedCheckpoint

FOLDER = "xla_fsdp"
RANKS = "xla_fsdp_ranks.json"


def save_whole(trainer: Trainer, folder: str) -> None:
    """Implements ``Trainer.save_model``. Rank 0 writes the files that a single process writes.

    These are the full weights and the configuration; for a model with adapters of peft, the
    adapters and their configuration; for another module, its ``state_dict()``. The tokenizer and
    the training arguments follow.
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

    RankExchange().run_on_first_rank("save the model", write)


def load_whole(trainer: Trainer, model: nn.Module, folder: str) -> None:
    """Loads the files of :func:`save_whole` into a sharded ``model``. Every rank must call it.

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
    """Saves model, optimizer and scheduler for any number of ranks."""
    save_checkpoint(
        os.path.join(folder, FOLDER),
        trainer.model,
        _plain(trainer.optimizer),
        trainer.lr_scheduler,
        step=trainer.state.global_step,
    )


def record_ranks(trainer: Trainer, folder: str) -> None:
    """Writes the number of ranks that save a checkpoint, sharded or not, into its ``folder``."""
    if trainer.args.should_save:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, RANKS), "w") as file:
            json.dump({"world_size": trainer.args.world_size}, file)


def remove_training(folder: str) -> None:
    """Removes everything but the model that an earlier run saved in the folder of a checkpoint.
    Otherwise resuming would load the model and the optimizer of that run. Every rank must call it.
    """

    def remove() -> None:
        shutil.rmtree(os.path.join(folder, FOLDER), ignore_errors=True)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state*.pth"):
            for path in glob.glob(os.path.join(glob.escape(folder), name)):
                os.remove(path)

    RankExchange().run_on_first_rank("remove what another run saved", remove)


def load_training(trainer: Trainer, folder: str) -> None:
    """Loads the files of :func:`save_training`, or those of a Trainer without sharding.

    Raises:
        ValueError: torch_xla's FSDP saved the folder.
        CheckpointError: the checkpoint is damaged, or does not fit.
    """
    optimizer, scheduler = _plain(trainer.optimizer), trainer.lr_scheduler
    ours = os.path.join(folder, FOLDER)
    exchange = RankExchange()
    there = exchange.run_on_first_rank("look at the checkpoint", lambda: sorted(os.listdir(folder)))
    if FOLDER in there:
        load_checkpoint(ours, trainer.model, optimizer, scheduler, restore_rng=False)
        return
    if any(name.startswith("rank0-of-") and name.endswith("-optimizer.pt") for name in there):
        raise ValueError(
            f"{folder} has an optimizer state of torch_xla's FSDP, one shard of a flat vector per "
            "rank, which cannot be loaded: remove the files rank*-optimizer.pt in it to resume "
            "with the model alone and a new optimizer"
        )
    if not {"optimizer.pt", "scheduler.pt"} <= set(there):
        warnings.warn(
            f"{folder} has no optimizer state and no scheduler state (save_only_model?): both "
            "start from their initial state",
            stacklevel=2,
        )
        return

    def read(name: str) -> Any:
        return torch.load(os.path.join(folder, name), map_location="cpu", weights_only=True)

    state = exchange.run_on_each_rank("read the optimizer", lambda: read("optimizer.pt"))
    load_full_optim_state_dict(trainer.model, optimizer, state)
    exchange.run_and_gather(
        "load the scheduler", lambda: scheduler.load_state_dict(read("scheduler.pt"))
    )


def load_random_state(trainer: Trainer, folder: str) -> None:
    """Restores the random states of Python, numpy, torch and XLA that this rank saved.

    On another number of ranks, Python and numpy get the state of rank 0. torch and XLA get seeds
    computed from this state and the number of the rank, so two resumed runs get the same random
    numbers. Warns if the checkpoint lacks a state.
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
    """Returns the number of ranks that saved a checkpoint; ``None``: several, not recorded.

    :func:`record_ranks` records it, except in older versions and on machines without this package.
    Then the number is in the manifest of this package. A Trainer without sharding writes
    ``rng_state.pth`` if it is the only process.
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
    """Returns the optimizer without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
