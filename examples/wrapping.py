"""Flags for the sharding of a network, and the arguments of the wrapper for them."""

from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from absl import flags
from common.script import Stop
from torch import nn

import xla_fsdp

POLICIES, DTYPES = ["none", "size_based", "type_based"], ["float32", "float16", "bfloat16"]
flags.DEFINE_bool("use_nested_fsdp", None, "wrap layer by layer; default: without a policy")
flags.DEFINE_enum("auto_wrap_policy", "none", POLICIES, "which layers get wrapped")
flags.DEFINE_integer("auto_wrap_min_num_params", 1_000_000, "minimum size for size_based", 1)
flags.DEFINE_bool("use_gradient_checkpointing", False, "recompute wrapped layers in the backward")
flags.DEFINE_bool("flatten_parameters", False, "store each layer's parameters as one vector")
flags.DEFINE_bool("shard_param_on_dim_0", False, "shard along dimension 0, keeping the shape")
flags.DEFINE_bool("fp32_reduce_scatter", False, "reduce gradients in float32")
flags.DEFINE_enum("compute_dtype", "float32", DTYPES, "narrow ones are slow on CPU")


# Flags that exclude settings, which also choose these options: see common/tuning.py.
SHARDING = "use_nested_fsdp auto_wrap_policy use_gradient_checkpointing".split()


def set_defaults(options: SimpleNamespace) -> None:
    """Sets the default of --use_nested_fsdp: true, unless a policy wraps layers."""
    if options.use_nested_fsdp is None:
        options.use_nested_fsdp = options.auto_wrap_policy == "none"
    if options.use_nested_fsdp and options.auto_wrap_policy != "none":
        raise Stop("--use_nested_fsdp excludes --auto_wrap_policy", code=2)


def arguments(options: SimpleNamespace) -> dict[str, Any]:
    """The arguments of ``XlaFullyShardedDataParallel``."""
    names = ("fp32_reduce_scatter", "flatten_parameters", "shard_param_on_dim_0")
    given = {name: getattr(options, name) for name in names}
    return {"compute_dtype": getattr(torch, options.compute_dtype), **given}


def policy(
    options: SimpleNamespace, network: nn.Module, blocks: Collection[type[nn.Module]]
) -> Callable | None:
    """The ``auto_wrap_policy`` of the wrapper; ``blocks``: the classes that type_based wraps."""
    if options.auto_wrap_policy == "none":
        return None
    if options.auto_wrap_policy == "size_based":
        least = options.auto_wrap_min_num_params
        return partial(xla_fsdp.size_based_auto_wrap_policy, min_num_params=least)
    if not any(isinstance(module, tuple(blocks)) for module in network.modules()):
        knows = "supports no block of this model; use size_based"
        raise Stop(f"--auto_wrap_policy=type_based {knows}", code=2)
    return partial(xla_fsdp.transformer_auto_wrap_policy, transformer_layer_cls=blocks)
