"""The Trainer on XLA with our sharding: ``import xla_fsdp.integrations.transformers``.

After the import, ``Trainer`` wraps models in this package's class if FSDP is configured: with
``fsdp="full_shard auto_wrap"`` and ``fsdp_config={"xla": True, ...}``, or in Accelerate. Gradients,
norms and groups for weight decay are those of unsharded training. ``save_model`` writes the full
weights. A checkpoint resumes with optimizer, scheduler and random state on any number of ranks.
``XLA_FSDP_DROP_IN=1`` in the environment does the import.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.trainer
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, FSDPOption

from ..collectives.order import BackwardPrefetch
from ..names import WRAPPED
from ..sharding.cpu_offload import CPUOffload
from ..sharding.mixed_precision import MixedPrecision
from ..sharding.state import is_sharded
from ..tree import keep_dtype
from . import accelerate as _accelerate  # first: it changes the Accelerator of every Trainer
from .changes import Changes
from .sharding import Sharding, downcasting, meant_by_name, restore, sharding_of, use_sharding
from .trainer_checkpoints import (
    load_random_state,
    load_training,
    load_whole,
    record_ranks,
    remove_training,
    save_training,
    save_whole,
)

__all__ = ["Trainer", "install", "uninstall"]

changes = Changes("transformers")


def install() -> None:
    """Makes the changes in transformers and Accelerate, unless they are already made."""
    _accelerate.install()
    changes.apply()


def uninstall() -> None:
    """Undoes the changes in transformers. Accelerate's have a separate ``uninstall``."""
    changes.undo()


# -- reading the arguments ----------------------------------------------------------------------


_STRATEGIES = frozenset(FSDPOption) - {FSDPOption.OFFLOAD, FSDPOption.AUTO_WRAP}
# Allowed in fsdp_config. The first ones have no effect, see accelerate.py.
_WITHOUT_EFFECT = frozenset(
    "forward_prefetch use_orig_params cpu_ram_efficient_loading version state_dict_type".split()
)
_KNOWN = _WITHOUT_EFFECT | frozenset(
    "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt activation_checkpointing min_num_params "
    "transformer_layer_cls_to_wrap sync_module_states limit_all_gathers backward_prefetch "
    "reshard_after_forward cpu_offload".split()
)


def sharding_of_arguments(args: TrainingArguments) -> Sharding:
    """Translates ``fsdp``, ``fsdp_config`` and ``bf16``.

    These entries of ``fsdp_config`` have an effect: ``xla_fsdp_settings`` (options of the wrapper
    by name; dtypes, strategies and prefetch as strings), ``xla_fsdp_grad_ckpt`` or
    ``activation_checkpointing``, ``transformer_layer_cls_to_wrap``, ``min_num_params``,
    ``sync_module_states``, ``limit_all_gathers``, ``backward_prefetch``, ``cpu_offload`` and
    ``reshard_after_forward``. The last is true, false or the name of a sharding strategy.
    Transformers 5 moves the values of ``fsdp`` to the last two.

    Raises:
        ValueError: an entry is unknown, has an invalid value, or is not supported on XLA.
    """
    config = args.fsdp_config
    unknown = sorted(set(config) - _KNOWN)
    if unknown:
        raise ValueError(
            f"fsdp_config has entries that the Trainer does not support on XLA: "
            f"{', '.join(unknown)}. Supported are {', '.join(sorted(_KNOWN))}"
        )
    if args.fp16:
        raise ValueError(
            "fp16=True is not supported with sharding on XLA, because TPUs have no float16 "
            "units: use bf16=True, which needs no loss scaling"
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile=True is not supported with sharding on XLA, which compiles every step "
            "without Dynamo: leave it out"
        )
    # The Trainer's default, because the models that the ranks built may differ.
    options: dict[str, Any] = {"sync_module_states": True}
    named = args.fsdp if isinstance(args.fsdp, list) else []  # in Transformers 5 it is true
    if FSDPOption.OFFLOAD in named or _flag("cpu_offload", config.get("cpu_offload", False)):
        options["cpu_offload"] = CPUOffload()
    reshard = next((each.value for each in named if each in _STRATEGIES), None)
    reshard = config.get("reshard_after_forward", reshard)
    settings = dict(args.xla_fsdp_config)
    if reshard is not None and not {"reshard_after_forward", "sharding_strategy"} & set(settings):
        if str(reshard).lower() in ("true", "false"):
            options["reshard_after_forward"] = _flag("reshard_after_forward", reshard)
        else:
            options |= meant_by_name(str(reshard))
    for name in ("sync_module_states", "limit_all_gathers"):
        if name in config:
            options[name] = _flag(name, config[name])
    if "backward_prefetch" in config:
        options["backward_prefetch"] = _prefetch(config["backward_prefetch"])
    if "sharding_strategy" in settings:
        options |= meant_by_name(str(settings.pop("sharding_strategy")))
    if "backward_prefetch" in settings:
        options["backward_prefetch"] = _prefetch(settings.pop("backward_prefetch"))
    options |= settings
    if args.bf16 and not {"compute_dtype", "mixed_precision"} & set(settings):
        options["mixed_precision"] = MixedPrecision(torch.bfloat16)
    checkpointing = "xla_fsdp_grad_ckpt", "activation_checkpointing"
    return Sharding(
        options,
        layers=config.get("transformer_layer_cls_to_wrap"),
        min_parameters=config["min_num_params"],
        checkpointing=any(_flag(name, config.get(name, False)) for name in checkpointing),
        full_precision=args.bf16 or "compute_dtype" in settings,
        output_dtype=torch.float32 if "mixed_precision" in options else None,
    )


def _flag(name: str, value: Any) -> bool:
    """Converts a flag, which may be a string in configuration files."""
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"fsdp_config[{name!r}] must be true or false, got {value!r}")
    return str(value).lower() == "true"


def _prefetch(value: Any) -> BackwardPrefetch | None:
    if value is None or isinstance(value, BackwardPrefetch):
        return value
    name = str(value).upper()
    if name == "NO_PREFETCH":
        return None
    if name not in BackwardPrefetch.__members__:
        allowed = ", ".join([*BackwardPrefetch.__members__, "NO_PREFETCH"]).lower()
        raise ValueError(f"backward_prefetch must be one of {allowed}, got {value!r}")
    return BackwardPrefetch[name]


# -- wrapping and the optimizer ----------------------------------------------------------------


@changes.around(Trainer, "create_accelerator_and_postprocess")
def _create_accelerator(original: Any, self: Trainer) -> None:
    before = downcasting()
    original(self)
    args, state = self.args, self.accelerator.state
    asked: dict[str, Any] = args.fsdp_config or {}
    if args.fsdp and asked["xla"] and not asked["xla_fsdp_v2"]:
        restore(before)
        use_sharding(state, sharding_of_arguments(args))
        self.accelerator.native_amp = False
    elif sharding_of(state) is not None:  # from a config file, which the Trainer does not read
        args.fsdp = args.fsdp or [FSDPOption.AUTO_WRAP]
        args.fsdp_config = asked | {"xla": True}


@changes.around(Trainer, "_wrap_model")
def _wrap_model(
    original: Any, self: Trainer, model: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    if not self.is_fsdp_xla_v1_enabled:
        return original(self, model, *args, **kwargs)
    if not is_sharded(model):
        model = self.accelerator.prepare_model(model)
    self.model = self.model_wrapped = model
    return model


@changes.around(Trainer, "get_decay_parameter_names")
def _decay_names(original: Any, self: Trainer, model: nn.Module) -> list[str]:
    """Removes the names of wrappers, which the original finds in the tree of modules."""
    return [name.replace(f"{WRAPPED}.", "") for name in original(self, model)]


@changes.around(Trainer, "get_optimizer_cls_and_kwargs")
def _optimizer(original: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Removes the default ``fused``: that kernel supports no XLA tensors, and XLA fuses anyway."""
    cls, options = original(*args, **kwargs)
    if options.get("fused"):
        options = {name: value for name, value in options.items() if name != "fused"}
    return cls, options


# -- the loss ----------------------------------------------------------------------------------


# On a Trainer during a training step: the number of micro-batches that it accumulates, and whether
# it divides every loss by that number itself.
_MICRO_BATCHES = "_xla_fsdp_micro_batches"


@contextlib.contextmanager
def _accumulating(trainer: Trainer) -> Iterator[None]:
    """Inside, ``compute_loss`` is part of a training step; outside, of an evaluation."""
    number = getattr(trainer, "current_gradient_accumulation_steps", 1)  # set by train()
    divides = getattr(trainer, "loss_is_scaled_for_ga", None) is False  # since Transformers 5
    setattr(trainer, _MICRO_BATCHES, (number, divides))
    try:
        yield
    finally:
        delattr(trainer, _MICRO_BATCHES)


def _global_loss(trainer: Trainer, compute: Callable[[Any], Any], num_items: Any) -> Any:
    """``Trainer.compute_loss``, right for losses that use ``num_items`` and for those that do not.

    ``num_items`` is the number of labels in all micro-batches of all ranks. The Trainer assumes
    that a loss which receives it is a sum divided by it. So it multiplies the loss by the number of
    ranks, because gradients are averaged over them, and it adds up the micro-batches. A mean (label
    smoothing, a router's loss, a model that ignores ``num_items``) becomes too large by both
    numbers. Whether a loss uses ``num_items`` cannot be known, and a loss can be the sum of both
    kinds. Therefore the loss receives the mean number of labels in a micro-batch of one rank. Then
    both kinds are means, and so is their sum: the mean over ranks and micro-batches is the loss
    on the global batch.

    Args:
        compute: ``Trainer.compute_loss`` as a function of ``num_items``. Returns the loss, or the
            loss and the outputs.
        num_items: what the Trainer counted; ``None`` if it did not count.
    """
    is_mean = not trainer.model_accepts_loss_kwargs or num_items is None
    if is_mean and trainer.compute_loss_func is None:
        return compute(num_items)  # training_step divides it by the micro-batches
    micro, divides = getattr(trainer, _MICRO_BATCHES, (1, False))
    parts = 1 if divides else micro
    if num_items is not None:
        if trainer.args.average_tokens_across_devices:
            ranks = trainer.accelerator.num_processes  # by which compute multiplies
            parts, micro = parts * ranks, micro * ranks
        num_items = num_items / micro
        if isinstance(num_items, torch.Tensor):
            keep_dtype(num_items)  # bfloat16 would round it
    found = compute(num_items)
    if isinstance(found, tuple):
        return found[0] / parts, *found[1:]
    return found / parts


@changes.around(Trainer, "training_step")
def _training_step(original: Any, self: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
    with _accumulating(self):
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
    return _global_loss(self, compute, num_items_in_batch)


# -- saving and loading ------------------------------------------------------------------------


@changes.around(Trainer, "save_model")
def _save_model(
    original: Any, self: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    if not is_sharded(self.model):
        return original(self, output_dir, _internal_call)
    save_whole(self, output_dir or self.args.output_dir)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


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
def _training_loop(
    original: Any, self: Trainer, batch_size: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Uses the batch size of the arguments, unless ``auto_find_batch_size`` found it.

    Before release 5 the original takes ``per_device_train_batch_size`` from the checkpoint. On
    another number of ranks this would change the global batch and the number of steps.
    """
    resuming = kwargs.get("resume_from_checkpoint") is not None
    if resuming and self.is_fsdp_xla_v1_enabled and not self.args.auto_find_batch_size:
        batch_size = self.args.train_batch_size
    return original(self, batch_size, *args, **kwargs)


_reading = threading.Lock()


@changes.around(transformers.trainer, "safe_globals")
@contextlib.contextmanager
def _safe_globals(original: Any) -> Iterator[None]:
    """Admits one rank at a time, because the classes that ``torch.load`` trusts are a list of the
    process."""
    with _reading, original():
        yield


install()
