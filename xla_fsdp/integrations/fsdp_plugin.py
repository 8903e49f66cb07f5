"""Accelerate's ``FullyShardedDataParallelPlugin`` (version 1 or 2) as options of our wrapper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import wrap as torch_wrap

from ..collectives.order import BackwardPrefetch
from ..sharding.cpu_offload import CPUOffload
from ..sharding.mixed_precision import MixedPrecision
from .sharding import Sharding, meant_by_name


def sharding_of_plugin(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> Sharding:
    """What the plugin asks for.

    ``forward_prefetch`` and ``use_orig_params`` have no effect: layers are always gathered ahead in
    the forward, as GPUs do without being asked, and parameters are always the original ones. Nor
    have the configurations of state dicts: whole ones are of the first rank, on the host.

    Args:
        plugin: as Accelerate made it from arguments or from the environment that a config file
            becomes.
        mixed_precision: Accelerate's: ``"no"``, ``"bf16"``, ...

    Raises:
        ValueError, TypeError: it asks for something that does not go on XLA; the message says what
            to change.
    """
    if mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={mixed_precision!r} does not go with sharding on XLA, whose TPUs "
            "compute in bfloat16 and float32: use 'bf16', which needs no loss scaling, or 'no'"
        )
    options: dict[str, Any] = {"limit_all_gathers": bool(plugin.limit_all_gathers)}
    if plugin.param_init_fn is not None:
        options["param_init_fn"] = plugin.param_init_fn
    if plugin.fsdp_version == 2:
        options["reshard_after_forward"] = bool(plugin.reshard_after_forward)
        # There it has the first rank's weights sent to all, without being told so.
        options["sync_module_states"] = bool(plugin.cpu_ram_efficient_loading)
    else:
        options |= meant_by_name((plugin.sharding_strategy or plugin.reshard_after_forward).name)
        options["sync_module_states"] = bool(plugin.sync_module_states)
        prefetch = plugin.backward_prefetch
        options["backward_prefetch"] = None if prefetch is None else BackwardPrefetch[prefetch.name]
    options["cpu_offload"] = _offload(plugin)
    precision = _precision(plugin, mixed_precision)
    if precision is not None:
        options["mixed_precision"] = precision
    return Sharding(
        options,
        full_precision=mixed_precision != "no",
        full_state=plugin.state_dict_type.name == "FULL_STATE_DICT",
        checkpointing=bool(plugin.activation_checkpointing),
        ignored=_ignored(plugin.ignored_modules),
        output_dtype=_output_dtype(plugin, mixed_precision),
        **_units(plugin),
    )


def _offload(plugin: FullyShardedDataParallelPlugin) -> CPUOffload | None:
    """torch's ``CPUOffload`` or, in version 2, its ``CPUOffloadPolicy``."""
    asked = plugin.cpu_offload
    offloads = getattr(asked, "offload_params", False) or isinstance(asked, CPUOffloadPolicy)
    return CPUOffload() if offloads else None


def _ignored(given: Any) -> Sequence[nn.Module] | str:
    if isinstance(given, str):
        try:
            re.compile(given)
        except re.error as error:
            raise ValueError(
                f"fsdp_ignored_modules={given!r} must be a regular expression that the whole name "
                f"of each ignored module matches: {error}"
            ) from error
        return given
    modules = () if given is None else tuple(given)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                "ignored_modules must be modules, or a regular expression that the whole name of "
                f"each matches, got {type(module).__name__}"
            )
    return modules


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


def _output_dtype(
    plugin: FullyShardedDataParallelPlugin, mixed_precision: str
) -> torch.dtype | None:
    """Accelerate gives float32 where it was asked for mixed precision itself."""
    asked = getattr(plugin.mixed_precision_policy, "output_dtype", None)
    return asked or (torch.float32 if mixed_precision != "no" else None)


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
