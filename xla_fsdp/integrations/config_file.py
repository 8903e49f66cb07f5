"""Accelerate's configuration file, as the variables that an ``Accelerator`` looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)

from ..wording import in_a_line

# Options whose variables have other names; the others are called alike.
_VARIABLES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
}
# Options that are one of some names, or the number of one, from 1 on.
_NAMED = {
    "fsdp_sharding_strategy": FSDP_SHARDING_STRATEGY,
    "fsdp_auto_wrap_policy": FSDP_AUTO_WRAP_POLICY,
    "fsdp_backward_prefetch": FSDP_BACKWARD_PREFETCH,
    "fsdp_backward_prefetch_policy": FSDP_BACKWARD_PREFETCH,
    "fsdp_state_dict_type": FSDP_STATE_DICT_TYPE,
}
_FLAGS = frozenset(
    "fsdp_" + name
    for name in (
        "offload_params forward_prefetch use_orig_params sync_module_states "
        "cpu_ram_efficient_loading activation_checkpointing"
    ).split()
)
_OTHERS = frozenset(
    "fsdp_" + name
    for name in (
        "version reshard_after_forward transformer_layer_cls_to_wrap min_num_params ignored_modules"
    ).split()
)
_OPTIONS = sorted({*_NAMED, *_FLAGS, *_OTHERS})
# Sections of the file for what is not there on XLA.
_FOREIGN = ("deepspeed_config", "megatron_lm_config", "fp8_config", "parallelism_config")


def read_config(path: str | None) -> ClusterConfig:
    """The file at ``path``, or where ``accelerate config`` puts it.

    Raises:
        ValueError: it is none of Accelerate's.
        OSError: it can not be read.
    """
    try:
        config = load_config_from_file(path)
    except (AttributeError, KeyError, TypeError, yaml.YAMLError) as error:  # anything but a mapping
        raise ValueError(
            f"{path} is not what accelerate config writes ({in_a_line(error)}); "
            "docs/hugging-face.md has an example"
        ) from error
    if not isinstance(config, ClusterConfig):
        raise ValueError("the config file is for SageMaker, which has no TPUs")
    return config


def environment_of(config: ClusterConfig) -> dict[str, str]:
    """The variables in which an ``Accelerator`` looks for what a config file says.

    Raises:
        ValueError: there is an option that nobody knows, or that does not go on XLA, or with a
            value that it has not.
    """
    foreign = [name for name in _FOREIGN if getattr(config, name)]
    backend = (config.dynamo_config or {}).get("dynamo_backend", "NO")
    if str(backend).upper() != "NO":
        foreign.append(f"dynamo_config (dynamo_backend: {backend})")
    if foreign:
        raise ValueError(f"{', '.join(foreign)} does not go on XLA: leave it out")
    # What starts without "fsdp_" is meant as well, as in accelerate launch.
    given = {
        name if name.startswith("fsdp_") else f"fsdp_{name}": value
        for name, value in (config.fsdp_config or {}).items()
        if value is not None
    }
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"fsdp_config: {', '.join(unknown)} is none of {', '.join(_OPTIONS)}")
    sharded = bool(given) or str(config.distributed_type).endswith("FSDP")
    # An unquoted "no" is false in YAML.
    precision = str(config.mixed_precision or "no")
    if sharded and precision not in ("no", "bf16"):
        raise ValueError(f"mixed_precision: {precision} does not go on XLA: 'bf16' or 'no'")
    found = {"ACCELERATE_MIXED_PRECISION": precision}
    if sharded:
        found["ACCELERATE_USE_FSDP"] = "true"
        found |= _variables(given)
    return found


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    version = str(given.get("fsdp_version", 1))
    if version not in ("1", "2"):
        raise ValueError(f"fsdp_version: {version} must be 1 or 2")
    if "fsdp_auto_wrap_policy" not in given:
        for name in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
            if name in given:
                raise ValueError(
                    f"{name} needs fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP (by class) or "
                    "SIZE_BASED_WRAP (by number), without which nothing is wrapped by itself"
                )
    found = {}
    for name, value in given.items():
        found[_VARIABLES.get(name, name.upper())] = _text(name, value, version)
    return found


def _text(name: str, value: Any, version: str) -> str:
    text = str(value).strip()
    if name == "fsdp_reshard_after_forward":
        name = "fsdp_sharding_strategy" if version == "1" else "reshard_after_forward"
        if version == "1" and text.lower() in ("true", "false"):
            raise ValueError(
                f"fsdp_reshard_after_forward: {text.lower()} goes with fsdp_version: 2; in version "
                f"1 it is one of {', '.join(FSDP_SHARDING_STRATEGY)}"
            )
    if name in _NAMED:
        names = _NAMED[name]
        if text.upper() not in names and text not in map(str, range(1, len(names) + 1)):
            raise ValueError(f"{name}: {text} must be one of {', '.join(names)}")
        return text.upper()
    if name in _FLAGS or name == "reshard_after_forward":
        if text.lower() not in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            raise ValueError(f"{name}: {text} must be true or false")
        return text.lower()
    if name == "fsdp_transformer_layer_cls_to_wrap":
        classes = value if isinstance(value, (list, tuple)) else text.split(",")
        return ",".join(str(one).strip() for one in classes)
    if name == "fsdp_min_num_params":  # YAML takes 1e8 for a string
        try:
            return str(int(float(text)))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name}: {text} must be a number of parameters") from error
    return text
