"""The Trainer on XLA with our sharding: ``import xla_fsdp.integrations.transformers``.

From then on ``Trainer`` with ``fsdp="full_shard auto_wrap"``, ``fsdp_config={"xla": True, ...}``,
or under a configuration of Accelerate that asks for FSDP, wraps models in this package's class:
gradients, norms and decay groups are those of plain training, ``save_model`` writes whole weights,
and a checkpoint resumes with optimizer, scheduler and random state on any number of ranks.
``XLA_FSDP_DROP_IN=1`` in the environment does the import.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers.trainer
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..names import WRAPPED
from ..sharding.around import is_sharded
from . import accelerate as _accelerate  # first: it changes the Accelerator of every Trainer
from .changes import Changes
from .sharding import downcasting, restore, sharding_of, use_sharding
from .trainer_checkpoints import (
    load_random_state,
    load_training,
    load_whole,
    record_ranks,
    remove_training,
    save_training,
    save_whole,
)
from .trainer_losses import accumulating, global_loss
from .trainer_settings import sharding_of_arguments

__all__ = ["Trainer", "install", "uninstall"]

changes = Changes("transformers", ["4.57.6"])


def install() -> None:
    """Makes the changes, here and in Accelerate, unless they are made."""
    _accelerate.install()
    changes.apply()


def uninstall() -> None:
    """Undoes the changes in transformers; Accelerate's have an ``uninstall`` of their own."""
    changes.undo()


# -- wrapping and the optimizer ----------------------------------------------------------------


@changes.around(Trainer, "create_accelerator_and_postprocess")
def _create_accelerator(original: Any, self: Trainer) -> None:
    before = downcasting()
    original(self)
    asked = self.args.fsdp_config
    state = self.accelerator.state
    if asked["xla"] and not asked["xla_fsdp_v2"] and self.args.fsdp:
        restore(before)
        use_sharding(state, sharding_of_arguments(self.args))
        self.accelerator.native_amp = False
    elif sharding_of(state) is not None:  # from a config file: the Trainer is to know of it
        asked["xla"] = True


@changes.around(Trainer, "_wrap_model")
def _wrap_model(
    original: Any, self: Trainer, model: nn.Module, training: bool = True, dataloader: Any = None
) -> nn.Module:
    if not self.is_fsdp_xla_v1_enabled:
        return original(self, model, training, dataloader)
    if not is_sharded(model):
        model = self.accelerator.prepare_model(model)
    self.model = self.model_wrapped = model
    return model


@changes.around(Trainer, "get_decay_parameter_names")
def _decay_names(original: Any, self: Trainer, model: nn.Module) -> list[str]:
    """It walks over modules and so meets wrappers, whose parameters are named as without them."""
    return [name.replace(f"{WRAPPED}.", "") for name in original(self, model)]


@changes.around(Trainer, "get_optimizer_cls_and_kwargs")
def _optimizer(original: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The default is AdamW's fused kernel, which knows no XLA tensors; a TPU fuses by itself."""
    cls, options = original(*args, **kwargs)
    if options.get("fused"):
        options = {name: value for name, value in options.items() if name != "fused"}
    return cls, options


# -- the loss ----------------------------------------------------------------------------------


@changes.around(Trainer, "training_step")
def _training_step(original: Any, self: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
    with accumulating(self):
        return original(self, *args, **kwargs)


@changes.around(Trainer, "compute_loss")
def _compute_loss(
    original: Any,
    self: Trainer,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    compute = functools.partial(original, self, model, inputs, return_outputs)
    if not self.is_fsdp_xla_v1_enabled:
        return compute(num_items_in_batch)
    return global_loss(self, compute, num_items_in_batch)


# -- saving and loading ------------------------------------------------------------------------


@changes.around(Trainer, "_save_tpu")
def _save_tpu(original: Any, self: Trainer, output_dir: str | None = None) -> None:
    if not is_sharded(self.model):
        return original(self, output_dir)
    return save_whole(self, output_dir or self.args.output_dir)


@changes.around(Trainer, "_save_optimizer_and_scheduler")
def _save_optimizer(original: Any, self: Trainer, output_dir: str) -> None:
    if not is_sharded(self.model):
        return original(self, output_dir)
    return save_training(self, output_dir)


@changes.around(Trainer, "_save_checkpoint")
def _save_checkpoint(original: Any, self: Trainer, model: nn.Module, trial: Any) -> None:
    name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
    folder = os.path.join(self._get_output_dir(trial=trial), name)
    if self.args.save_only_model and is_sharded(self.model):
        remove_training(folder)
    record_ranks(self, folder)
    return original(self, model, trial)


@changes.around(Trainer, "_load_optimizer_and_scheduler")
def _load_optimizer(original: Any, self: Trainer, checkpoint: str | None) -> None:
    if checkpoint is None or not is_sharded(self.model):
        return original(self, checkpoint)
    return load_training(self, checkpoint)


@changes.around(Trainer, "_load_from_checkpoint")
def _load_model(
    original: Any, self: Trainer, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    model = self.model if model is None else model
    if not is_sharded(model):
        return original(self, resume_from_checkpoint, model)
    load_whole(self, model, resume_from_checkpoint)


@changes.around(Trainer, "_load_best_model")
def _load_best_model(original: Any, self: Trainer) -> None:
    if not is_sharded(self.model):
        return original(self)
    load_whole(self, self.model, self.state.best_model_checkpoint)


@changes.around(Trainer, "_load_rng_state")
def _load_rng_state(original: Any, self: Trainer, checkpoint: str | None) -> None:
    if checkpoint is None or not is_sharded(self.model):
        return original(self, checkpoint)
    return load_random_state(self, checkpoint)


@changes.around(Trainer, "_inner_training_loop")
def _training_loop(original: Any, self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """The Trainer would take ``per_device_train_batch_size`` from the checkpoint.

    On another number of ranks the global batch and the number of steps would then be others. The
    arguments decide, unless ``auto_find_batch_size`` found the batch.
    """
    resuming = kwargs.get("resume_from_checkpoint") is not None
    if resuming and self.is_fsdp_xla_v1_enabled and not self.args.auto_find_batch_size:
        kwargs["batch_size"] = self.args.train_batch_size
    return original(self, *args, **kwargs)


_reading = threading.Lock()


@changes.around(transformers.trainer, "safe_globals")
@contextlib.contextmanager
def _safe_globals(original: Any) -> Iterator[None]:
    """One rank at a time: what torch.load trusts is a list of the whole process."""
    with _reading, original():
        yield


install()
