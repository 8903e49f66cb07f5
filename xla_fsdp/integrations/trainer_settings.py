"""What ``TrainingArguments`` say of FSDP on XLA, as options of our wrapper."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import FSDPOption

from ..collectives.order import BackwardPrefetch
from ..sharding.cpu_offload import CPUOffload
from ..sharding.mixed_precision import MixedPrecision
from .sharding import Sharding, meant_by_name

_STRATEGIES = {
    FSDPOption.FULL_SHARD: "FULL_SHARD",
    FSDPOption.SHARD_GRAD_OP: "SHARD_GRAD_OP",
    FSDPOption.NO_SHARD: "NO_SHARD",
    FSDPOption.HYBRID_SHARD: "HYBRID_SHARD",
    FSDPOption.HYBRID_SHARD_ZERO2: "_HYBRID_SHARD_ZERO2",
}


# What fsdp_config may have: the first change nothing here, see fsdp_plugin.py.
_WITHOUT_EFFECT = frozenset("forward_prefetch use_orig_params cpu_ram_efficient_loading".split())
_KNOWN = _WITHOUT_EFFECT | frozenset(
    "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt activation_checkpointing min_num_params "
    "transformer_layer_cls_to_wrap sync_module_states limit_all_gathers backward_prefetch".split()
)


def sharding_of_arguments(args: TrainingArguments) -> Sharding:
    """What ``fsdp``, ``fsdp_config`` and ``bf16`` ask for.

    Of ``fsdp_config`` counts: ``xla_fsdp_settings`` (options of the wrapper by name; dtypes,
    strategies and prefetch as strings), ``xla_fsdp_grad_ckpt`` or ``activation_checkpointing``,
    ``transformer_layer_cls_to_wrap``, ``min_num_params``, ``sync_module_states``,
    ``limit_all_gathers`` and ``backward_prefetch``.

    Raises:
        ValueError: one of them is none of those that go on XLA, or has a name that is none.
    """
    config = args.fsdp_config
    unknown = sorted(set(config) - _KNOWN)
    if unknown:
        raise ValueError(
            f"fsdp_config has {', '.join(unknown)}, of which the Trainer knows nothing on XLA; it "
            f"knows {', '.join(sorted(_KNOWN))}"
        )
    if args.fp16:
        raise ValueError(
            "fp16=True does not go with sharding on XLA, whose TPUs have no float16 units: use "
            "bf16=True, which needs no loss scaling"
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile=True does not go with sharding on XLA, which compiles every step as it "
            "is: leave it out"
        )
    # The Trainer's default: models that ranks have built may differ.
    options: dict[str, Any] = {"sync_module_states": True}
    if FSDPOption.OFFLOAD in args.fsdp:
        options["cpu_offload"] = CPUOffload()
    strategies = [_STRATEGIES[option] for option in args.fsdp if option in _STRATEGIES]
    settings = dict(args.xla_fsdp_config)
    if strategies and not {"reshard_after_forward", "sharding_strategy"} & set(settings):
        options |= meant_by_name(strategies[0])
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
    """A switch, which configuration files have as a string, too."""
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
