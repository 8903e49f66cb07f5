"""Accelerate on XLA with this package's sharding: ``import xla_fsdp.integrations.accelerate``.

Without an FSDP configuration the import changes only how an Accelerator detects the last batch.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import accelerate.accelerator
import accelerate.checkpointing
import torch
import torch_xla
import torch_xla.runtime as xr
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderShard, MpDeviceLoaderWrapper
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    clean_state_dict_for_safetensors,
    parse_flag_from_env,
)
from accelerate.utils.dataclasses import KwargsHandler
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import wrap as torch_wrap

from ..checkpoint.full_state import full_state_dict, gather_state
from ..checkpoint.rank_exchange import RankExchange
from ..collectives.order import BackwardPrefetch
from ..ranks.rank import current_rank
from ..sharding.cpu_offload import CPUOffload
from ..sharding.mixed_precision import MixedPrecision
from ..sharding.optimizer_hook import has_shards
from ..sharding.sharded_parameter import ShardedParameter, ShardedValue
from ..sharding.sharded_tensor import require_reduced
from ..sharding.state import is_sharded
from ..tree import tensors_in
from ..wrapper import XlaFullyShardedDataParallel
from .changes import LibraryChanges
from .full_weights import outermost_wrapper, with_full_tensors
from .optimizers import average_unsharded, load_joined, save_alone, switch_to_shards
from .sharding import (
    SHARD_SIZE,
    Sharding,
    downcasting,
    meant_by_name,
    restore,
    sharding_of,
    use_sharding,
)

__all__ = ["Accelerator", "install", "uninstall"]

changes = LibraryChanges("accelerate")
install = changes.apply
uninstall = changes.undo

# Environment variables (``FSDP_...``) cannot be checked: Accelerate reads them inside of functions.
changes.require(
    Accelerator,
    *("save_iteration", "wait_for_everyone", "num_processes"),
    "register_load_state_pre_hook",
)
changes.require(
    AcceleratorState,
    *("_reset_state", "mixed_precision", "__init__(fsdp_plugin)"),
    "__init__(parallelism_config)",
)
changes.require(
    GradientState, *("_add_dataloader", "_remove_dataloader", "is_xla_gradients_synced")
)
changes.require(MpDeviceLoaderWrapper, "dataloader")
changes.require(DataLoaderShard, "remainder", "end_of_dataloader")
changes.require(KwargsHandler, "to_dict")
changes.require(
    FullyShardedDataParallelPlugin,
    *("fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch"),
    *("mixed_precision_policy", "auto_wrap_policy", "transformer_cls_names_to_wrap"),
    *("min_num_params", "cpu_offload", "ignored_modules", "state_dict_type", "param_init_fn"),
    *("sync_module_states", "cpu_ram_efficient_loading", "limit_all_gathers"),
    "activation_checkpointing",
)

# On an AcceleratedOptimizer: whether its gradients are averaged over all ranks.
_AVERAGED = "_xla_fsdp_averaged"
# The folder in a saved state that has the checkpoint of this package.
FOLDER = "xla_fsdp"


def sharding_of_plugin(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> Sharding:
    """Translates the plugin, and the ``mixed_precision`` of Accelerate. Raises ValueError or
    TypeError for an option that is not supported on XLA."""
    if mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={mixed_precision!r} is not supported with sharding on XLA, because "
            "TPUs compute in bfloat16 and float32: use 'bf16', which needs no loss scaling, or 'no'"
        )
    options: dict[str, Any] = {"limit_all_gathers": bool(plugin.limit_all_gathers)}
    if plugin.param_init_fn is not None:
        options["param_init_fn"] = plugin.param_init_fn
    if plugin.fsdp_version == 2:
        options["reshard_after_forward"] = bool(plugin.reshard_after_forward)
        # In version 2 this option also broadcasts the weights of rank 0.
        options["sync_module_states"] = bool(plugin.cpu_ram_efficient_loading)
    else:
        options |= meant_by_name((plugin.sharding_strategy or plugin.reshard_after_forward).name)
        options["sync_module_states"] = bool(plugin.sync_module_states)
        prefetch = plugin.backward_prefetch
        options["backward_prefetch"] = None if prefetch is None else BackwardPrefetch[prefetch.name]
    asked = plugin.cpu_offload  # torch's CPUOffload or, in version 2, its CPUOffloadPolicy
    if getattr(asked, "offload_params", False) or isinstance(asked, CPUOffloadPolicy):
        options["cpu_offload"] = CPUOffload()
    # Accelerate returns float32 outputs if mixed_precision is its own option.
    output_dtype = getattr(plugin.mixed_precision_policy, "output_dtype", None)
    if output_dtype is None and mixed_precision != "no":
        output_dtype = torch.float32
    precision = _precision(plugin, mixed_precision)
    if precision is not None:
        options["mixed_precision"] = precision
    return Sharding(
        options,
        full_precision=mixed_precision != "no",
        full_state=plugin.state_dict_type.name == "FULL_STATE_DICT",
        checkpointing=bool(plugin.activation_checkpointing),
        ignored=_check_ignored(plugin.ignored_modules),
        output_dtype=output_dtype,
        **_wrap_policy(plugin),
    )


def _check_ignored(given: Any) -> Sequence[nn.Module] | str:
    if isinstance(given, str):
        try:
            re.compile(given)
        except re.error as error:
            raise ValueError(
                f"fsdp_ignored_modules={given!r} must be a regular expression that matches the "
                f"full name of each ignored module: {error}"
            ) from error
        return given
    modules = () if given is None else tuple(given)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                "ignored_modules must be modules, or a regular expression that matches the full "
                f"name of each, got {type(module).__name__}"
            )
    return modules


def _wrap_policy(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    policy = plugin.auto_wrap_policy
    arguments: dict[str, Any] = {}
    # A script may have called set_auto_wrap_policy, which creates a functools.partial.
    if hasattr(policy, "func"):
        policy, arguments = policy.func, policy.keywords
    if policy is None:
        return {"layers": ()}
    if policy is torch_wrap.transformer_auto_wrap_policy:
        classes = arguments.get("transformer_layer_cls")
        if classes is not None:
            return {"layers": [each.__name__ for each in classes]}
        return {"layers": plugin.transformer_cls_names_to_wrap}
    if policy is torch_wrap.size_based_auto_wrap_policy:
        return {"min_parameters": arguments.get("min_num_params", plugin.min_num_params or 0)}
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy must be TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP or a "
            f"function (module, recurse, unwrapped_params) -> bool, got {policy!r}"
        )
    return {"policy": plugin.auto_wrap_policy}


def _precision(
    plugin: FullyShardedDataParallelPlugin, mixed_precision: str
) -> MixedPrecision | None:
    policy = plugin.mixed_precision_policy
    if policy is None:
        # Buffers keep their dtype: bfloat16 would change rotary frequencies.
        return MixedPrecision(torch.bfloat16) if mixed_precision == "bf16" else None
    names = [
        *("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads"),
        *("cast_forward_inputs", "cast_root_forward_inputs"),
    ]
    return MixedPrecision(**{n: getattr(policy, n) for n in names if hasattr(policy, n)})


@changes.around(PartialState, "__init__")
def _state_of_process(original: Any, self: PartialState, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.distributed_type == DistributedType.XLA and "LOCAL_RANK" not in os.environ:
        # Accelerate leaves -1. Then no rank is the first of its host, and none prints.
        rank = current_rank()
        self.local_process_index = xr.local_ordinal() if rank is None else rank.rank


@changes.around(AcceleratorState, "__init__")
def _init_state(original: Any, self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    before = downcasting()
    original(self, *args, **kwargs)
    plugin = kwargs.get("fsdp_plugin")
    if plugin is None or self.distributed_type != DistributedType.XLA or sharding_of(self):
        return
    restore(before)
    try:
        if self.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                f"dynamo_backend={self.dynamo_plugin.backend.value} is not supported with sharding "
                "on XLA, which compiles every step without Dynamo: set it to 'no'"
            )
        if kwargs.get("parallelism_config") is not None:
            raise ValueError(
                "parallelism_config is not supported with sharding on XLA: leave it out. For "
                "several sharded copies of the model, use the sharding strategy HYBRID_SHARD, and "
                f"set {SHARD_SIZE} in the environment to the number of ranks that share a copy"
            )
        use_sharding(self, sharding_of_plugin(plugin, self.mixed_precision))
    except Exception:
        AcceleratorState._reset_state(True)
        raise


@changes.around(FullyShardedDataParallelPlugin, "__post_init__")
def _plugin(original: Any, self: FullyShardedDataParallelPlugin) -> None:
    """Skips the search for a GPU, and restores the environment, in which the original writes the
    loading option: the next rank may be a thread of this process, and would read it."""
    version = self.fsdp_version or int(os.environ.get("FSDP_VERSION", "1"))
    named = _named_strategy(self) if version == 1 else None
    if named is not None:
        self.reshard_after_forward = named
    with _setting:
        before = {_LEAN: os.environ.get(_LEAN)}
        wanted = self.sync_module_states
        if wanted is None:
            wanted = parse_flag_from_env("FSDP_SYNC_MODULE_STATES")
        lean = self.cpu_ram_efficient_loading
        if lean is None:
            lean = parse_flag_from_env(_LEAN)
        if version == 1:
            self.sync_module_states = False
        self.cpu_ram_efficient_loading = False
        try:
            original(self)
        finally:
            restore(before)
    self.cpu_ram_efficient_loading = lean
    if version == 1:
        self.sync_module_states = wanted or lean
    if named is not None:
        self.sharding_strategy = self.reshard_after_forward


_setting = threading.Lock()
_LEAN = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def _named_strategy(plugin: FullyShardedDataParallelPlugin) -> Any:
    """Finds the sharding strategy of version 1 under the name ``reshard_after_forward``, as
    ``accelerate config`` writes it. Plugins accept that name, but ignore the value."""
    if plugin.sharding_strategy is not None or "FSDP_SHARDING_STRATEGY" in os.environ:
        return None
    given = plugin.reshard_after_forward or os.environ.get("FSDP_RESHARD_AFTER_FORWARD")
    return None if str(given).lower() in ("none", "true", "false") else given


@changes.around(KwargsHandler, "to_kwargs")
def _given(original: Any, self: KwargsHandler) -> dict[str, Any]:
    """Finds the values that differ from the defaults without clearing the environment, in which
    other ranks, which may be threads, would find no configuration, and not shard."""
    default = type(self)().to_dict()
    return {name: value for name, value in self.to_dict().items() if value != default[name]}


@changes.around(Accelerator, "__init__")
def _accelerator(original: Any, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if sharding_of(self.state) is not None:
        self.native_amp = False  # the wrapper computes in its own dtype


@changes.around(Accelerator, "prepare_model")
def _prepare_model(
    original: Any,
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    sharding = sharding_of(self.state)
    if not is_sharded(model):
        if sharding is None:
            return original(self, model, device_placement, evaluation_mode)
        model = sharding.shard(model)
    for optimizer in self._optimizers:
        switch_to_shards(optimizer.optimizer)
    if not any(model is known for known in self._models):
        self._models.append(model)
    return model


@changes.around(Accelerator, "prepare_optimizer")
def _prepare_optimizer(
    original: Any, self: Accelerator, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    switch_to_shards(getattr(optimizer, "optimizer", optimizer))
    return original(self, optimizer, *args, **kwargs)


@changes.around(Accelerator, "unwrap_model")
def _unwrap_model(
    original: Any, self: Accelerator, model: Any, *args: Any, **kwargs: Any
) -> nn.Module:
    """Removes only the outer wrapper: parameters are still shards."""
    inner: Any = model
    while isinstance(inner, XlaFullyShardedDataParallel):
        inner = inner.module
    return original(self, inner, *args, **kwargs)


@changes.around(Accelerator, "prepare_data_loader")
def _prepare_loader(
    original: Any,
    self: Accelerator,
    data_loader: Any,
    device_placement: bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if sharding_of(self.state) is not None and self.dispatch_batches and not device_placement:
        raise ValueError(
            "dispatch_batches=True needs batches that Accelerate moves to the device, which it "
            "does not do on XLA: leave the option out, so that each rank reads its own batches"
        )
    return original(self, data_loader, device_placement, *args, **kwargs)


class _LoaderPosition:
    end_of_dataloader = False
    remainder = -1


@changes.around(MpDeviceLoaderWrapper, "__iter__")
def _mark_last_batch(original: Any, self: MpDeviceLoaderWrapper) -> Iterator[Any]:
    """Marks the last batch when the loop receives it. The original marks it in the thread that
    reads ahead: ``gather_for_metrics`` would cut, and ``accumulate`` step, at an earlier batch."""
    self.dataloader.gradient_state = SimpleNamespace(
        _add_dataloader=lambda loader: None, _remove_dataloader=lambda loader: None
    )
    batches = iter(original(self))
    state, place, none = GradientState(), _LoaderPosition(), object()
    state._add_dataloader(place)
    try:
        batch = next(batches, none)
        while batch is not none:
            following = next(batches, none)
            place.remainder = self.dataloader.remainder
            place.end_of_dataloader = following is none
            yield batch
            batch = following
    finally:
        state._remove_dataloader(place)


# Accelerate reads it to count examples, and to save the position of a loader.
changes.set(MpDeviceLoaderWrapper, "dataset", property(lambda self: self.dataloader.dataset))


@changes.around(AcceleratedOptimizer, "step")
def _average_and_step(original: Any, self: AcceleratedOptimizer, closure: Any = None) -> None:
    if not has_shards(self.optimizer) and sharding_of(self.accelerator_state) is None:
        return original(self, closure)
    stepping = self.gradient_state.sync_gradients
    if stepping:
        _average(self)
        setattr(self, _AVERAGED, False)
    # Gradients of shards are averaged already. Accelerate would average different shards.
    self.gradient_state.is_xla_gradients_synced = True
    original(self, closure)
    if stepping:
        torch_xla.sync()


def _average(optimizer: AcceleratedOptimizer) -> None:
    if not getattr(optimizer, _AVERAGED, False):
        average_unsharded(optimizer.optimizer)
        setattr(optimizer, _AVERAGED, True)


@changes.around(Accelerator, "clip_grad_norm_")
def _clip(
    original: Any,
    self: Accelerator,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
) -> torch.Tensor:
    """Calls torch's function: the type of the shards makes their norm a global one."""
    given: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not _average_before_clipping(self):
        return original(self, given, max_norm, norm_type)
    require_reduced(given, "clip_grad_norm_")
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)


@changes.around(Accelerator, "clip_grad_value_")
def _clip_value(original: Any, self: Accelerator, parameters: Any, clip_value: float) -> None:
    _average_before_clipping(self)
    return original(self, parameters, clip_value)


def _average_before_clipping(accelerator: Accelerator) -> bool:
    """Returns whether a model is sharded."""
    if sharding_of(accelerator.state) is None and not _shards_models(accelerator):
        return False
    for optimizer in accelerator._optimizers:
        _average(optimizer)
    return True


def _shards_models(accelerator: Accelerator) -> bool:
    return any(map(is_sharded, accelerator._models))


@changes.around(Accelerator, "get_state_dict")
def _get_state_dict(
    original: Any, self: Accelerator, model: nn.Module, unwrap: bool = True
) -> dict[str, Any]:
    """The full state dict on rank 0, and ``{}`` on the others. Every rank must call it."""
    if not is_sharded(model):
        return original(self, model, unwrap)
    root, path = outermost_wrapper(model)  # the model may be unwrapped
    return gather_state(root, lambda _: True, rank0_only=True, offload_to_cpu=True, path=path)


@changes.around(Accelerator, "save_state", _shards_models)
def _save_state(original: Any, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Saves models, optimizers and schedulers to ``xla_fsdp/``, for any number of ranks. Accelerate
    names folders, removes old ones, and writes random states and registered objects."""
    with _only_hooks_get_models(self) as (models, optimizers):
        folder = original(self, *args, **kwargs)
    exchange = RankExchange()
    exchange.gather_values("save_state", None)  # the folder is there for all
    save_alone(
        os.path.join(folder, FOLDER),
        _joined_models(models),
        optimizers,
        step=self.save_iteration,
        extra={"step": self.step, "schedulers": [one.state_dict() for one in self._schedulers]},
    )
    sharding = sharding_of(self.state)
    if sharding is not None and sharding.full_state:
        for number, model in enumerate(models):
            name = f"model_{number}.safetensors" if number else "model.safetensors"
            path = os.path.join(folder, name)
            write = partial(_write_weights, full_state_dict(model), path)
            exchange.run_on_first_rank(f"write {path}", write)
    self.wait_for_everyone()
    return folder


@changes.around(accelerate.accelerator, "save_custom_state")
def _save_registered(original: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    state = with_full_tensors(obj.state_dict())
    return original(SimpleNamespace(state_dict=lambda: state), *args, **kwargs)


@changes.around(Accelerator, "save")
def _save_object(original: Any, self: Accelerator, obj: Any, *args: Any, **kwargs: Any) -> Any:
    if tensors_in(obj, (ShardedParameter, ShardedValue)):
        raise ValueError(
            "accelerator.save was given shards, of which it would save the part of one rank: call "
            "full_tensor() of each on every rank, and save the results"
        )
    return original(self, obj, *args, **kwargs)


def _write_weights(state: dict[str, Any], path: str) -> None:
    save_file(clean_state_dict_for_safetensors(state), path)


@changes.around(Accelerator, "load_state", _shards_models)
def _load_state(original: Any, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    found: list[str] = []
    handle = self.register_load_state_pre_hook(lambda models, folder: found.append(folder))
    try:
        with _only_hooks_get_models(self) as (models, optimizers):
            original(self, *args, **kwargs)
    finally:
        handle.remove()
    loaded = load_joined(os.path.join(found[0], FOLDER), _joined_models(models), optimizers)
    self.step = loaded.extra["step"]
    saved = loaded.extra["schedulers"]
    if len(saved) != len(self._schedulers):
        raise ValueError(
            f"{found[0]} has the state of {len(saved)} schedulers, but {len(self._schedulers)} are "
            "prepared: prepare the same ones before load_state"
        )
    for scheduler, state in zip(self._schedulers, saved, strict=True):
        scheduler.load_state_dict(state)


@contextlib.contextmanager
def _only_hooks_get_models(
    accelerator: Accelerator,
) -> Iterator[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
    """Inside, the accelerator has nothing to save or load; only hooks receive the models."""
    names = ("_models", "_optimizers", "_schedulers", "_dataloaders")
    hooks = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")
    before = {name: getattr(accelerator, name) for name in (*names, *hooks)}
    models = before["_models"]
    for loader in before["_dataloaders"]:
        if getattr(getattr(loader, "dataloader", loader), "use_stateful_dataloader", False):
            raise ValueError(
                "use_stateful_dataloader=True is not supported with sharded models, because the "
                "position of the loader cannot be saved: leave the option out and use "
                "accelerator.skip_first_batches"
            )
    try:
        for name in names:
            setattr(accelerator, name, [])
        for name in hooks:
            shown: OrderedDict[Any, Any] = OrderedDict()
            for key, hook in before[name].items():
                shown[key] = lambda _, *rest, hook=hook: hook(models, *rest)
            setattr(accelerator, name, shown)
        yield list(models), [each.optimizer for each in before["_optimizers"]]
    finally:
        for name, value in before.items():
            setattr(accelerator, name, value)


def _joined_models(models: list[nn.Module]) -> nn.Module:
    return models[0] if len(models) == 1 else nn.ModuleList(models)


_reading = threading.Lock()


@changes.around(accelerate.checkpointing, "load")
def _load_one_rank_at_a_time(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets one rank at a time load: the classes that ``torch.load`` trusts are a list of the
    process, which the original edits for a moment."""
    with _reading:
        return original(*args, **kwargs)


install()
