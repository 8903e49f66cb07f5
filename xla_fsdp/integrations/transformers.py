"""The Trainer on XLA with our sharding: ``import xla_fsdp.integrations.transformers``.

It shards models if FSDP is configured: ``fsdp=True`` and ``fsdp_config={"xla": True, ...}``, or in
Accelerate.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import operator
import os
import random
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch_xla.core.xla_model as xm
import transformers.trainer
from accelerate.utils import clean_state_dict_for_safetensors
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME, _is_peft_model
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, FSDPOption
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..checkpoint.full_state import full_state_dict, load_full_optim_state_dict
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.rank_exchange import RankExchange
from ..checkpoint.saving import save_checkpoint
from ..checkpoint.weights import load_weights
from ..collectives.order import BackwardPrefetch
from ..consolidate.format.reader import ShardedCheckpoint
from ..names import WRAPPED
from ..sharding.cpu_offload import CPUOffload
from ..sharding.mixed_precision import MixedPrecision
from ..sharding.state import is_sharded
from ..tree import keep_dtype
from .changes import LibraryChanges
from .sharding import Sharding, downcasting, meant_by_name, restore, sharding_of, use_sharding

__all__ = ["Trainer", "install", "uninstall"]

changes = LibraryChanges("transformers")


def install() -> None:
    """Makes the changes in transformers and Accelerate, or none: raises MissingNamesError if a
    release lacks names that are changed or used."""
    changes.check()
    # Every Trainer uses an Accelerator. The import makes its changes, so it comes after the check.
    importlib.import_module(f"{__package__}.accelerate").install()
    changes.apply()


def uninstall() -> None:
    """Undoes the changes in transformers; Accelerate's have their own ``uninstall``."""
    changes.undo()


changes.require(
    Trainer, "push_to_hub", *("_get_output_dir", "_inner_training_loop(resume_from_checkpoint)")
)
if hasattr(Trainer, "_sync_replicated_trainable_parameters"):  # release 5.19 added both
    changes.require(Trainer, "loss_is_scaled_for_ga")
changes.require(
    TrainingArguments,
    *("fsdp", "fsdp_config", "bf16", "fp16", "torch_compile", "output_dir"),
    *("average_tokens_across_devices", "push_to_hub", "hub_revision", "save_only_model"),
    *("should_save", "world_size", "process_index", "train_batch_size", "auto_find_batch_size"),
)
changes.require(TrainerState, "global_step", "best_model_checkpoint")
changes.require(FSDPOption, "OFFLOAD", "AUTO_WRAP")
changes.require(PreTrainedModel, "_no_split_modules")


# Allowed in fsdp_config. Those in the last line have no effect.
_KNOWN = frozenset(
    "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt activation_checkpointing min_num_params "
    "transformer_layer_cls_to_wrap sync_module_states limit_all_gathers backward_prefetch "
    "reshard_after_forward cpu_offload "
    "forward_prefetch use_orig_params cpu_ram_efficient_loading version state_dict_type".split()
)


def sharding_of_arguments(args: TrainingArguments) -> Sharding:
    """Translates ``fsdp``, ``fsdp_config`` and ``bf16``. Raises ValueError if an entry is unknown,
    has an invalid value, or is not supported on XLA."""
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
    others = FSDPOption.OFFLOAD, FSDPOption.AUTO_WRAP
    reshard = next((each.value for each in named if each not in others), None)
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
        options["backward_prefetch"] = _parse_prefetch(config["backward_prefetch"])
    if "sharding_strategy" in settings:
        options |= meant_by_name(str(settings.pop("sharding_strategy")))
    if "backward_prefetch" in settings:
        options["backward_prefetch"] = _parse_prefetch(settings.pop("backward_prefetch"))
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
    """Converts a flag, which is a string in some configuration files."""
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"fsdp_config[{name!r}] must be true or false, got {value!r}")
    return str(value).lower() == "true"


def _parse_prefetch(value: Any) -> BackwardPrefetch | None:
    if value is None or isinstance(value, BackwardPrefetch):
        return value
    name = str(value).upper()
    if name == "NO_PREFETCH":
        return None
    if name not in BackwardPrefetch.__members__:
        allowed = ", ".join([*BackwardPrefetch.__members__, "NO_PREFETCH"]).lower()
        raise ValueError(f"backward_prefetch must be one of {allowed}, got {value!r}")
    return BackwardPrefetch[name]


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


_is_configured = operator.attrgetter("is_fsdp_xla_v1_enabled")


@changes.around(Trainer, "_wrap_model", _is_configured)
def _wrap_model(
    original: Any, self: Trainer, model: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    if not is_sharded(model):
        model = self.accelerator.prepare_model(model)
    self.model = self.model_wrapped = model
    return model


@changes.around(Trainer, "get_decay_parameter_names")
def _decay_names(original: Any, self: Trainer, model: nn.Module) -> list[str]:
    """Removes the names of wrappers, which the original finds."""
    return [name.replace(f"{WRAPPED}.", "") for name in original(self, model)]


@changes.around(Trainer, "get_optimizer_cls_and_kwargs")
def _drop_fused(original: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Removes the default ``fused``: that kernel supports no XLA tensors, and XLA fuses anyway."""
    cls, options = original(*args, **kwargs)
    return cls, {name: value for name, value in options.items() if name != "fused"}


# On a Trainer during a training step: the number of micro-batches that it accumulates.
_MICRO_BATCHES = "_xla_fsdp_micro_batches"


@changes.around(Trainer, "training_step")
def _note_micro_batches(original: Any, self: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
    setattr(self, _MICRO_BATCHES, self.current_gradient_accumulation_steps)
    try:
        return original(self, *args, **kwargs)
    finally:
        delattr(self, _MICRO_BATCHES)


@changes.around(Trainer, "compute_loss", _is_configured)
def _compute_loss(
    original: Any,
    self: Trainer,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Right for losses that use ``num_items_in_batch`` and for those that do not.

    This is the number of labels in all micro-batches of all ranks; ``None``: not counted. The
    Trainer assumes that a loss is a sum divided by it, so it multiplies by the number of ranks, and
    adds up the micro-batches. That makes a mean (label smoothing, a router's loss, a model that
    ignores the number) too large by both. Which kind a loss is cannot be known, and it can be the
    sum of both. So it receives the mean number of labels in a micro-batch of one rank. Then both
    kinds are means, and their mean is the loss on the global batch.
    """
    num_items = num_items_in_batch
    is_mean = not self.model_accepts_loss_kwargs or num_items is None
    if is_mean and self.compute_loss_func is None:  # training_step divides by the micro-batches
        return original(self, model, inputs, return_outputs, num_items)
    micro = getattr(self, _MICRO_BATCHES, 1)
    # Earlier releases of Transformers do not have this attribute, and ignore a subclass's.
    known = hasattr(Trainer, "loss_is_scaled_for_ga")
    parts = 1 if known and self.loss_is_scaled_for_ga is False else micro
    if num_items is not None:
        if self.args.average_tokens_across_devices:
            ranks = self.accelerator.num_processes  # by which the original multiplies
            parts, micro = parts * ranks, micro * ranks
        num_items = num_items / micro
        if isinstance(num_items, torch.Tensor):
            keep_dtype(num_items)  # bfloat16 would round it
    found = original(self, model, inputs, return_outputs, num_items)
    if isinstance(found, tuple):
        return found[0] / parts, *found[1:]
    return found / parts


# In ``checkpoint-N``, beside the files that ``from_pretrained`` reads: a checkpoint of this package
# with model, optimizer and scheduler, and the number of ranks that saved it.

FOLDER = "xla_fsdp"
RANKS = "xla_fsdp_ranks.json"


def _trains_shards(trainer: Trainer) -> bool:
    return is_sharded(trainer.model)


@changes.around(Trainer, "save_model", _trains_shards)
def _save_model(
    original: Any, self: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    folder = output_dir or self.args.output_dir
    model: Any = self.accelerator.unwrap_model(self.model)
    safe = getattr(self.args, "save_safetensors", True)  # always, since 5
    state: dict[str, Any] = {}
    knows_shards = isinstance(model, PreTrainedModel) or _is_peft_model(model)
    if knows_shards:
        model.save_pretrained(folder, **({} if safe else {"safe_serialization": False}))
    else:
        state = full_state_dict(self.model)

    def write() -> None:
        os.makedirs(folder, exist_ok=True)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
        if not knows_shards and safe:
            whole = clean_state_dict_for_safetensors(state)
            save_file(whole, os.path.join(folder, SAFE_WEIGHTS_NAME), metadata={"format": "pt"})
        elif not knows_shards:
            torch.save(state, os.path.join(folder, WEIGHTS_NAME))
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    RankExchange().run_on_first_rank("save the model", write)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


@changes.around(Trainer, "_load_from_checkpoint", _trains_shards)
def _load_model(
    original: Any, self: Trainer, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    model = self.model if model is None else model
    inner: Any = self.accelerator.unwrap_model(model)
    if not _is_peft_model(inner):
        load_weights(model, resume_from_checkpoint)
        return
    for adapter in inner.peft_config:
        part = "" if adapter == "default" else adapter
        inner.load_adapter(os.path.join(resume_from_checkpoint, part), adapter)


@changes.around(Trainer, "_load_best_model", _trains_shards)
def _load_best_model(original: Any, self: Trainer) -> None:
    self._load_from_checkpoint(self.state.best_model_checkpoint)


@changes.around(Trainer, "_save_checkpoint")
def _save_checkpoint(original: Any, self: Trainer, model: nn.Module, trial: Any) -> None:
    name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
    folder = os.path.join(self._get_output_dir(trial=trial), name)
    if self.args.save_only_model and is_sharded(self.model):
        RankExchange().run_on_first_rank(
            "remove what another run saved", lambda: _remove_training(folder)
        )
    if self.args.should_save:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, RANKS), "w") as file:
            json.dump({"world_size": self.args.world_size}, file)
    return original(self, model, trial)


def _remove_training(folder: str) -> None:
    """Removes what an earlier run saved for resuming, which would load that run's optimizer."""
    shutil.rmtree(os.path.join(folder, FOLDER), ignore_errors=True)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state*.pth"):
        for path in glob.glob(os.path.join(glob.escape(folder), name)):
            os.remove(path)


@changes.around(Trainer, "_save_optimizer_and_scheduler", _trains_shards)
def _save_optimizer(original: Any, self: Trainer, output_dir: str) -> None:
    save_checkpoint(
        os.path.join(output_dir, FOLDER),
        self.model,
        getattr(self.optimizer, "optimizer", self.optimizer),
        self.lr_scheduler,
        step=self.state.global_step,
    )


@changes.around(Trainer, "_load_optimizer_and_scheduler", _trains_shards)
def _load_sharded_optimizer(original: Any, self: Trainer, checkpoint: str | None) -> None:
    """Loads what :func:`_save_optimizer` saved, or a Trainer without sharding."""
    if checkpoint is None:
        return
    folder, scheduler = checkpoint, self.lr_scheduler
    optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
    exchange = RankExchange()
    there = exchange.run_on_first_rank("look at the checkpoint", lambda: sorted(os.listdir(folder)))
    if FOLDER in there:
        ours = os.path.join(folder, FOLDER)
        load_checkpoint(ours, self.model, optimizer, scheduler, restore_rng=False)
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
    load_full_optim_state_dict(self.model, optimizer, state)
    exchange.run_and_gather(
        "load the scheduler", lambda: scheduler.load_state_dict(read("scheduler.pt"))
    )


@changes.around(Trainer, "_load_rng_state", _trains_shards)
def _load_rng_state(original: Any, self: Trainer, checkpoint: str | None) -> None:
    """Restores the random states that this rank saved. On another number of ranks, Python and numpy
    get those of rank 0, and torch and XLA get seeds computed from these and the rank."""
    if checkpoint is None:
        return
    folder, rank = checkpoint, self.args.process_index
    saved = _ranks_that_saved(folder)
    same = saved == self.args.world_size
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
    if xla_state is None or not same:
        source = torch_state if xla_state is None else str(xla_state).encode()
        xla_state = _seed(source, rank)
    xm.set_rng_state(xla_state)


def _ranks_that_saved(folder: str) -> int | None:
    """The number of ranks that saved a checkpoint; ``None``: several, not recorded. Older versions
    of this package recorded it only in the manifest; a single process writes ``rng_state.pth``."""
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


@changes.around(Trainer, "_inner_training_loop")
def _training_loop(
    original: Any, self: Trainer, batch_size: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Uses the batch size of the arguments, not of the checkpoint as releases before 5: on another
    number of ranks that changes the global batch."""
    resuming = kwargs.get("resume_from_checkpoint") is not None
    if resuming and self.is_fsdp_xla_v1_enabled and not self.args.auto_find_batch_size:
        batch_size = self.args.train_batch_size
    return original(self, batch_size, *args, **kwargs)


_reading = threading.Lock()


@changes.around(transformers.trainer, "safe_globals")
@contextlib.contextmanager
def _safe_globals(original: Any) -> Iterator[None]:
    """Admits one rank at a time: it edits a list of the process, which ``torch.load`` trusts."""
    with _reading, original():
        yield


install()
