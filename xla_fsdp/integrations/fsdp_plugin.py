"""Accelerate's ``FullyShardedDataParallelPlugin`` (version 1 or 2) as options of our wrapper."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import wrap as torch_wrap

from ..collectives.order import BackwardPrefetch
from ..sharding.mixed_precision import MixedPrecision
from .sharding import Sharding, meant_by_name


def sharding_of_plugin(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> Sharding:
    """What the plugin asks for.

    ``forward_prefetch`` and ``use_orig_params`` have no effect: layers are always gathered ahead in
    the forward, as GPUs do without being asked, and parameters are always the original ones.

    Args:
        plugin: as Accelerate made it from arguments or from the environment that a config file
            becomes.
        mixed_precision: Accelerate's: ``"no"``, ``"bf16"``, ...

    Raises:
        ValueError, TypeError: it asks for something that does not go on XLA; the message says what
            to change.
    """
    _refuse_what_is_not_there(plugin)
    options: dict[str, Any] = {"limit_all_gathers": bool(plugin.limit_all_gathers)}
    if plugin.fsdp_version == 2:
        options["reshard_after_forward"] = bool(plugin.reshard_after_forward)
    else:
        options |= meant_by_name((plugin.sharding_strategy or plugin.reshard_after_forward).name)
        options["sync_module_states"] = bool(plugin.sync_module_states)
        prefetch = plugin.backward_prefetch
        options["backward_prefetch"] = None if prefetch is None else BackwardPrefetch[prefetch.name]
    if mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision='fp16' does not go with sharding on XLA, whose TPUs have no float16 "
            "units: use 'bf16', which needs no loss scaling"
        )
    precision = _precision(plugin, mixed_precision)
    if precision is not None:
        options["mixed_precision"] = precision
    return Sharding(
        options,
        full_precision=mixed_precision != "no",
        full_state=plugin.state_dict_type.name == "FULL_STATE_DICT",
        checkpointing=bool(plugin.activation_checkpointing),
        **_units(plugin),
    )


def _refuse_what_is_not_there(plugin: FullyShardedDataParallelPlugin) -> None:
    offload = plugin.cpu_offload
    if getattr(offload, "offload_params", False) or type(offload).__name__ == "CPUOffloadPolicy":
        raise ValueError(
            "fsdp_offload_params (cpu_offload) is not possible on XLA yet: set it to false"
        )
    if plugin.ignored_modules:
        raise ValueError(
            f"fsdp_ignored_modules={plugin.ignored_modules!r} is not possible on XLA: a parameter "
            "that is not sharded would not be trained alike on all ranks; freeze it instead "
            "(requires_grad_(False)), or leave the option out"
        )


def _units(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    """Which submodules are wrapped by themselves."""
    policy = plugin.auto_wrap_policy
    arguments: dict[str, Any] = {}
    # set_auto_wrap_policy, which a script may have called, makes a partial of it.
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
        # Buffers keep their dtype: rotary frequencies in bfloat16 would be other frequencies.
        return MixedPrecision(torch.bfloat16) if mixed_precision == "bf16" else None
    names = [
        *("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads"),
        *("cast_forward_inputs", "cast_root_forward_inputs"),
    ]
    return MixedPrecision(**{n: getattr(policy, n) for n in names if hasattr(policy, n)})
