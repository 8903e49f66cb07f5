"""``python -m xla_fsdp.integrations.launch --config_file fsdp.yaml script.py ...``

Does what ``accelerate launch`` does for GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import (
    ClusterConfig,
    default_config_file,
    load_config_from_file,
)
from accelerate.utils.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)

from ..compiled.cache import platform_of_ranks
from ..ranks.errors import RankError
from ..ranks.launch import launch
from ..wording import to_one_line

# Options whose environment variables have other names.
_VARIABLES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
}
_FLAG = ("TRUE", "FALSE", "YES", "NO", "ON", "OFF", "1", "0")
# The allowed values of options; ``None``: any. A name can also be its number, counted from 1.
_OPTIONS: dict[str, Sequence[str] | None] = {
    "fsdp_sharding_strategy": FSDP_SHARDING_STRATEGY,
    "fsdp_auto_wrap_policy": FSDP_AUTO_WRAP_POLICY,
    "fsdp_backward_prefetch": FSDP_BACKWARD_PREFETCH,
    "fsdp_backward_prefetch_policy": FSDP_BACKWARD_PREFETCH,
    "fsdp_state_dict_type": FSDP_STATE_DICT_TYPE,
    "fsdp_offload_params": _FLAG,
    "fsdp_forward_prefetch": _FLAG,
    "fsdp_use_orig_params": _FLAG,
    "fsdp_sync_module_states": _FLAG,
    "fsdp_cpu_ram_efficient_loading": _FLAG,
    "fsdp_activation_checkpointing": _FLAG,
    "fsdp_version": ("1", "2"),
    "fsdp_reshard_after_forward": None,  # depends on the version
    "fsdp_transformer_layer_cls_to_wrap": None,
    "fsdp_min_num_params": None,
    "fsdp_ignored_modules": None,
}
# What accelerate raises for anything but a mapping, and for other bytes than text.
_UNREADABLE = (
    AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError,
)  # fmt: skip
# Sections of the file that are not supported on XLA.
_FOREIGN = ("deepspeed_config", "megatron_lm_config", "fp8_config", "parallelism_config")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. Raises what the script raises on a rank, see :func:`xla_fsdp.launch`."""
    parser = argparse.ArgumentParser(prog="python -m xla_fsdp.integrations.launch")
    parser.add_argument("--config_file", help="a file of accelerate config; default: its default")
    parser.add_argument(
        "--num_processes",
        type=int,
        help="CPU ranks, 1 to 8; default: from the file. A TPU always has one rank per chip",
    )
    parser.add_argument("script", help="a file with the function main, or the one in the config")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    try:
        config = read_config(options.config_file)
        variables = environment_of(config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if config.use_cpu:
        variables["PJRT_DEVICE"] = "CPU"
    if not os.path.isfile(options.script):
        parser.error(f"{options.script}: there is no such file; pass the path of a script")
    os.environ.update(variables)
    on_cpu = platform_of_ranks() == "CPU"
    ranks = options.num_processes or config.num_processes
    if on_cpu and not 1 <= ranks <= 8:
        given = "no number of ranks" if ranks == -1 else f"{ranks} CPU ranks are not possible"
        parser.error(
            f"{given}: set num_processes in the config file to 1 to 8, or pass --num_processes"
        )
    function = config.main_training_function or "main"
    sys.argv = [options.script, *options.arguments]
    if on_cpu:
        import_integrations()
    try:
        launch(
            run_script,
            (os.path.abspath(options.script), function, options.arguments),
            num_devices=ranks if on_cpu else None,
        )
    except RankError as error:
        if isinstance(error.__cause__, SystemExit):  # the script has reported the error
            raise error.__cause__ from None
        raise


def run_script(rank: int, path: str, function: str, arguments: Sequence[str]) -> None:
    """Calls ``function`` of the file ``path``, with the rank if it has a parameter."""
    import_integrations()
    script = Path(path)
    sys.argv = [path, *arguments]
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    module = importlib.import_module(script.stem)
    called = getattr(module, function, None)
    if called is None:
        raise AttributeError(
            f"{path} has no function {function!r} to call on every rank: set "
            "main_training_function in the config file to the function that trains"
        )
    called(*([rank] if inspect.signature(called).parameters else []))


def import_integrations() -> None:
    """Call it before ranks start: as threads, they cannot import transformers safely."""
    importlib.import_module("xla_fsdp.integrations.accelerate")
    if importlib.util.find_spec("transformers") is not None:
        importlib.import_module("xla_fsdp.integrations.transformers")


def read_config(path: str | None) -> ClusterConfig:
    """Reads the file ``path``, or the default file of ``accelerate config``. Raises ValueError if
    it is not a config file of Accelerate, OSError if it cannot be read."""
    path = path or default_config_file
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"there is no config file {path}: pass another --config_file, or write one with "
            "accelerate config; docs/how-to/accelerate.md has an example"
        )
    try:
        config = load_config_from_file(path)
    except _UNREADABLE as error:
        raise ValueError(
            f"{path} is not a config file of Accelerate ({to_one_line(error)}); "
            "docs/how-to/accelerate.md has an example"
        ) from error
    if not isinstance(config, ClusterConfig):
        raise ValueError(
            "the config file is for SageMaker, which has no TPUs: set compute_environment to "
            "LOCAL_MACHINE"
        )
    return config


def environment_of(config: ClusterConfig) -> dict[str, str]:
    """The environment variables from which an ``Accelerator`` reads the configuration. Raises
    ValueError if an option is unknown, has an invalid value, or is not supported on XLA."""
    foreign = [name for name in _FOREIGN if getattr(config, name)]
    backend = (config.dynamo_config or {}).get("dynamo_backend", "NO")
    if str(backend).upper() != "NO":
        foreign.append(f"dynamo_config (dynamo_backend: {backend})")
    if foreign:
        raise ValueError(f"{', '.join(foreign)} is not supported on XLA: leave it out")
    # The prefix "fsdp_" is optional, as in accelerate launch.
    given = {
        name if name.startswith("fsdp_") else f"fsdp_{name}": value
        for name, value in (config.fsdp_config or {}).items()
        if value is not None
    }
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise ValueError(
            f"fsdp_config has unknown options: {', '.join(unknown)}. Supported are "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    sharded = bool(given) or str(config.distributed_type).endswith("FSDP")
    # An unquoted "no" is false in YAML.
    precision = str(config.mixed_precision or "no")
    if sharded and precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision: {precision} is not supported with sharding on XLA: use 'bf16' or "
            "'no'"
        )
    found = {"ACCELERATE_MIXED_PRECISION": precision}
    if not sharded:
        return found
    for name in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        if name in given and "fsdp_auto_wrap_policy" not in given:
            raise ValueError(
                f"{name} has no effect without fsdp_auto_wrap_policy: set that to "
                "TRANSFORMER_BASED_WRAP (layers by class) or SIZE_BASED_WRAP (by parameters)"
            )
    found["ACCELERATE_USE_FSDP"] = "true"
    version = str(given.get("fsdp_version", 1))
    for name, value in given.items():
        found[_VARIABLES.get(name, name.upper())] = _option_value(name, value, version)
    return found


def _option_value(name: str, value: Any, version: str) -> str:
    text, allowed = str(value).strip(), _OPTIONS[name]
    if name == "fsdp_reshard_after_forward":
        allowed = FSDP_SHARDING_STRATEGY if version == "1" else _FLAG
        if version == "1" and text.lower() in ("true", "false"):
            raise ValueError(
                f"fsdp_reshard_after_forward: {text.lower()} needs fsdp_version: 2; in version "
                f"1 it must be one of {', '.join(FSDP_SHARDING_STRATEGY)}"
            )
    if name == "fsdp_transformer_layer_cls_to_wrap":
        classes = value if isinstance(value, (list, tuple)) else text.split(",")
        return ",".join(str(one).strip() for one in classes)
    if name == "fsdp_min_num_params":  # YAML reads 1e8 as a string
        try:
            return str(int(float(text)))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name}: {text} must be a number of parameters") from error
    if allowed is None:
        return text
    numbers = () if allowed is _FLAG else map(str, range(1, len(allowed) + 1))
    if text.upper() not in allowed and text not in numbers:
        known = "true or false" if allowed is _FLAG else f"one of {', '.join(allowed)}"
        raise ValueError(f"{name}: {text} must be {known}")
    return text.upper()


if __name__ == "__main__":
    main()
