"""Flags for the sharding of a network, and the wrapping that they choose."""

from collections.abc import Collection, Iterable
from functools import partial
from types import SimpleNamespace

import torch
from absl import flags
from common import tuning
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
SHARDING = ("use_nested_fsdp", "auto_wrap_policy", "use_gradient_checkpointing")


def set_defaults(options: SimpleNamespace) -> None:
    """Sets the default of --use_nested_fsdp: true, unless a policy wraps layers."""
    if options.use_nested_fsdp is None:
        options.use_nested_fsdp = options.auto_wrap_policy == "none"
    if options.use_nested_fsdp and options.auto_wrap_policy != "none":
        raise Stop("--use_nested_fsdp excludes --auto_wrap_policy", code=2)


def shard(
    model: nn.Module,
    options: SimpleNamespace,
    children: Iterable[str],
    blocks: Collection[type[nn.Module]],
) -> nn.Module:
    """Wraps parts of the model, and then the model, as the flags or --settings say.

    ``children``: the names of those that --use_nested_fsdp wraps; ``blocks``: the classes of those
    that --auto_wrap_policy=type_based wraps.
    """
    fsdp = partial(
        xla_fsdp.XlaFullyShardedDataParallel,
        compute_dtype=getattr(torch, options.compute_dtype),
        fp32_reduce_scatter=options.fp32_reduce_scatter,
        flatten_parameters=options.flatten_parameters,
        shard_param_on_dim_0=options.shard_param_on_dim_0,
    )
    blocks = {type(module) for module in model.modules()}.intersection(blocks)
    if options.sharding:  # from the file of --settings
        with tuning.applied(options):
            return options.sharding.wrap(model, blocks or None, **fsdp.keywords)

    def wrap(layer: nn.Module, **forwarded: object) -> nn.Module:
        """Wraps a unit: its parameters are gathered, used, and freed before the next unit's."""
        if options.use_gradient_checkpointing:
            layer = xla_fsdp.checkpoint_module(layer)
        return fsdp(layer, **forwarded)

    policy = None
    if options.use_nested_fsdp:
        for name in children:
            setattr(model, name, wrap(getattr(model, name)))
    elif options.auto_wrap_policy == "size_based":
        policy = partial(
            xla_fsdp.size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        )
    elif options.auto_wrap_policy == "type_based":
        if not blocks:
            raise Stop("type_based supports no block of this model; use size_based", code=2)
        policy = partial(xla_fsdp.transformer_auto_wrap_policy, transformer_layer_cls=blocks)
    return fsdp(model, auto_wrap_policy=policy, auto_wrapper_callable=wrap)
