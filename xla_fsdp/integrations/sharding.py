"""How to wrap a model, for Accelerate and the Trainer."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_xla.runtime as xr
from torch import nn

from ..ranks.rank import current_rank
from ..ranks.slices import slices_of_ranks
from ..remat import checkpoint_module
from ..sharding.options import WRAPPER, FSDPOptions, ShardingStrategy
from ..tree import cast_floats
from ..wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from ..wrapper import XlaFullyShardedDataParallel

# The number of neighbouring ranks that share a copy of the parameters with a hybrid strategy.
SHARD_SIZE = "XLA_FSDP_HYBRID_SHARD_SIZE"

# An attribute of the state that the accelerators of a rank share.
_SHARDING = "xla_fsdp_sharding"


@dataclass(frozen=True)
class Sharding:
    """How to wrap a model.

    Attributes:
        options: arguments of :class:`~xla_fsdp.FSDPOptions`.
        layers: names of the classes that are wrapped separately; ``None``: those that the model
            lists in ``_no_split_modules``; empty: none.
        min_parameters: if not 0, wrap modules with at least this number of parameters instead.
        policy: ``policy(module, recurse, unwrapped)``, which replaces both.
        checkpointing: whether separately wrapped modules recompute their activations.
        full_precision: whether trainable parameters become float32.
        full_state: whether saves also contain the full parameters.
        ignored: replicated modules, perhaps of other models; or a regular expression that matches
            their full names.
        output_dtype: the dtype to which floating-point outputs are cast.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    layers: Sequence[str] | None = ()
    min_parameters: int = 0
    policy: Callable[..., bool] | None = None
    checkpointing: bool = False
    full_precision: bool = False
    full_state: bool = False
    ignored: Sequence[nn.Module] | str = ()
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        FSDPOptions.of(WRAPPER, **self.options)

    def shard(self, model: nn.Module) -> XlaFullyShardedDataParallel:
        """Wraps ``model``, whose parameters may be on any device, also on meta. Raises ValueError
        if ``layers`` are not in it, or ``checkpointing`` is set and no layer is wrapped."""
        policy = self._policy_for(model)
        if self.checkpointing and policy is None:
            raise ValueError(
                "activation checkpointing recomputes layers that are wrapped separately, and no "
                "layer is: name the layers (fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP and "
                "fsdp_transformer_layer_cls_to_wrap, or transformer_layer_cls_to_wrap of the "
                "Trainer's fsdp_config)"
            )
        ignored = self._ignored_in(model)
        if self.full_precision:
            whole = {parameter for module in ignored for parameter in module.parameters()}
            for parameter in model.parameters():
                narrow = parameter.dtype in (torch.bfloat16, torch.float16)
                if narrow and parameter.requires_grad and parameter not in whole:
                    parameter.data = parameter.data.float()
        config: Any = getattr(model, "config", None)
        if self.checkpointing and getattr(config, "use_cache", False):
            config.use_cache = False  # a recomputed layer would fill the cache again
        wrapper = functools.partial(wrap_recomputed, (nn.Module,)) if self.checkpointing else None
        sharded = XlaFullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            auto_wrapper_callable=wrapper,
            ignored_modules=ignored,
            **self.options,
        )
        if self.output_dtype is not None:
            sharded.register_forward_hook(functools.partial(_cast, self.output_dtype))
        return sharded

    def _ignored_in(self, model: nn.Module) -> list[nn.Module]:
        if not isinstance(self.ignored, str):
            return [module for module in model.modules() if module in self.ignored]
        pattern = re.compile(self.ignored)
        found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not found:
            names = ", ".join(name for name, _ in model.named_children())
            warnings.warn(
                f"fsdp_ignored_modules={self.ignored!r} matches the full name of no module of "
                f"{type(model).__name__}, so everything is sharded. The model has {names} and "
                "modules inside them",
                stacklevel=2,
            )
        return found

    def _policy_for(self, model: nn.Module) -> Callable[..., bool] | None:
        if self.policy is not None:
            return any_policy(self.policy)
        if self.min_parameters:
            return functools.partial(
                size_based_auto_wrap_policy, min_num_params=self.min_parameters
            )
        names = self.layers
        if names is None:
            names = list(getattr(model, "_no_split_modules", None) or ())
        if not names:
            return None
        there = {type(module).__name__: type(module) for module in model.modules()}
        missing = [name for name in names if name not in there]
        if missing and (self.layers is not None or len(missing) == len(names)):
            raise ValueError(
                f"no layer of {type(model).__name__} is of class {', '.join(missing)}. Name some "
                f"of its classes: {', '.join(sorted(there))}"
            )
        classes = {there[name] for name in names if name in there}
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)


def _cast(dtype: torch.dtype, module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return cast_floats(outputs, dtype)


def any_policy(policy: Callable[..., bool]) -> Callable[..., bool]:
    """Passes the last argument by position: other libraries name it otherwise."""

    def ask(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        return bool(policy(module, recurse, unwrapped_params))

    return ask


def wrap_recomputed(
    classes: Collection[type[nn.Module]], module: nn.Module, **options: Any
) -> nn.Module:
    """Wraps ``module``, which recomputes its activations if it is of one of ``classes``."""
    if isinstance(module, tuple(classes)):
        module = checkpoint_module(module)
    return XlaFullyShardedDataParallel(module, **options)


def strategy_by_name(strategy: str) -> ShardingStrategy:
    """Converts torch's name of a strategy, or ours, in upper or lower case; raises ValueError."""
    name = strategy.upper().removeprefix("SHARDINGSTRATEGY.")
    name = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}.get(name, name)
    if name not in ShardingStrategy.__members__:
        allowed = ", ".join(ShardingStrategy.__members__)
        raise ValueError(f"sharding strategy must be one of {allowed}, got {strategy!r}")
    return ShardingStrategy[name]


def meant_by_name(strategy: str) -> dict[str, Any]:
    """The options for a sharding strategy with torch's name; ValueError for another, or if ranks
    cannot be divided. With a hybrid strategy ``XLA_FSDP_HYBRID_SHARD_SIZE`` neighbouring ranks
    share a copy; without it the ranks of a host, or on several TPU slices those of a slice."""
    found = strategy_by_name(strategy)
    if "HYBRID" not in found.name or (SHARD_SIZE not in os.environ and slices_of_ranks()):
        return {"sharding_strategy": found}
    size, world = _ranks_of_a_host(), xr.world_size()
    if size < 1 or world % size:
        raise ValueError(
            f"{strategy}: {size} ranks share a copy of the parameters, but the {world} ranks are "
            f"not a multiple of {size}: set {SHARD_SIZE} to a divisor of {world}"
        )
    rows = [list(range(first, first + size)) for first in range(0, world, size)]
    return {"sharding_strategy": found, "device_mesh": rows}


def _ranks_of_a_host() -> int:
    given = os.environ.get(SHARD_SIZE)
    if given is not None:
        return int(given) if given.isdigit() else 0
    if current_rank() is not None:  # CPU ranks are one process
        return xr.world_size()
    return xr.local_device_count()


def sharding_of(state: Any) -> Sharding | None:
    """How the accelerators that share ``state`` wrap models; ``None``: they do not."""
    return vars(state).get(_SHARDING)


def use_sharding(state: Any, sharding: Sharding) -> None:
    setattr(state, _SHARDING, sharding)


def downcasting() -> dict[str, str | None]:
    """The environment variables that Accelerate sets on a TPU for ``bf16``. They would convert
    every float32 tensor, and Pallas kernels do not support them."""
    return {name: os.environ.get(name) for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")}


def restore(variables: Mapping[str, str | None]) -> None:
    """Restores environment variables; ``None``: the variable did not exist."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
