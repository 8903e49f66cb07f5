"""Flags that say how a network is sharded, and the wrapping itself."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from types import SimpleNamespace

import torch
from absl import flags
from torch import nn

import xla_fsdp

from .script import Stop

flags.DEFINE_bool(
    "use_nested_fsdp", None, "wrap layer by layer; default: unless --auto_wrap_policy is given"
)
flags.DEFINE_enum(
    "auto_wrap_policy", "none", ["none", "size_based", "type_based"], "which layers get wrapped"
)
flags.DEFINE_integer(
    "auto_wrap_min_num_params", 1_000_000, "least size of a layer for size_based", lower_bound=1
)
flags.DEFINE_bool(
    "use_gradient_checkpointing", False, "recompute activations of wrapped layers in the backward"
)
flags.DEFINE_bool("flatten_parameters", False, "store each layer's parameters as one vector")
flags.DEFINE_bool("shard_param_on_dim_0", False, "shard along dimension 0, keeping the shape")
flags.DEFINE_bool("fp32_reduce_scatter", False, "reduce gradients in float32")
flags.DEFINE_enum(
    "compute_dtype",
    "float32",
    ["float32", "float16", "bfloat16"],
    "dtype to compute in; the narrow ones are slow on CPU",
)


def settle(options: SimpleNamespace) -> None:
    """Layers are wrapped one by one unless a policy does it.

    Raises:
        Stop: with code 2: both were asked for.
    """
    if options.use_nested_fsdp is None:
        options.use_nested_fsdp = options.auto_wrap_policy == "none"
    if options.use_nested_fsdp and options.auto_wrap_policy != "none":
        raise Stop("--use_nested_fsdp excludes --auto_wrap_policy", code=2)


def shard(
    network: nn.Module,
    options: SimpleNamespace,
    device: torch.device,
    blocks: Collection[type[nn.Module]],
    children: Collection[str] | None = None,
) -> nn.Module:
    """Wraps ``network`` as the flags say.

    Args:
        blocks: classes that type_based wraps.
        children: names of those that nested wrapping wraps; default: all that have parameters.

    Raises:
        Stop: with code 2: type_based, and none of the blocks is in the network.
    """
    type_based = options.auto_wrap_policy == "type_based"
    if type_based and not any(isinstance(module, tuple(blocks)) for module in network.modules()):
        raise Stop(
            "--auto_wrap_policy=type_based knows none of the blocks of this model; use size_based",
            code=2,
        )
    policy = {
        "none": None,
        "size_based": partial(
            xla_fsdp.size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        ),
        "type_based": partial(xla_fsdp.transformer_auto_wrap_policy, transformer_layer_cls=blocks),
    }[options.auto_wrap_policy]
    fsdp = partial(
        xla_fsdp.XlaFullyShardedDataParallel,
        compute_dtype=getattr(torch, options.compute_dtype),
        fp32_reduce_scatter=options.fp32_reduce_scatter,
        flatten_parameters=options.flatten_parameters,
        shard_param_on_dim_0=options.shard_param_on_dim_0,
    )

    def wrap_layer(layer: nn.Module, **forwarded) -> nn.Module:
        if options.use_gradient_checkpointing:
            layer = xla_fsdp.checkpoint_module(layer)
        return fsdp(layer, **forwarded)

    network = network.to(device)
    if options.use_nested_fsdp:
        for name, child in list(network.named_children()):
            has_parameters = any(True for _ in child.parameters())
            if has_parameters if children is None else name in children:
                setattr(network, name, wrap_layer(child))
    return fsdp(network, auto_wrap_policy=policy, auto_wrapper_callable=wrap_layer)
