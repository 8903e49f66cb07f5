"""``python -m xla_fsdp.integrations.launch --config_file fsdp.yaml script.py ...``

What ``accelerate launch`` is for GPUs: runs a script's ``main`` on every rank, of the CPU or of
a TPU, under the configuration that ``accelerate config`` has written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from torch_xla._internal import tpu

from ..ranks.launch import launch
from .script import run_script

# Options of a config file whose variables have other names; the others are called alike.
_VARIABLES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
}
_OPTIONS = frozenset(
    "fsdp_" + name
    for name in (
        "version sharding_strategy reshard_after_forward offload_params auto_wrap_policy "
        "transformer_layer_cls_to_wrap min_num_params backward_prefetch backward_prefetch_policy "
        "forward_prefetch state_dict_type use_orig_params sync_module_states "
        "cpu_ram_efficient_loading activation_checkpointing ignored_modules"
    ).split()
)


def environment_of(config: ClusterConfig) -> dict[str, str]:
    """The variables in which an ``Accelerator`` looks for what a config file says.

    Raises:
        ValueError: there is an option that nobody knows.
    """
    given: Mapping[str, Any] = config.fsdp_config or {}
    unknown = sorted(set(given) - _OPTIONS)
    if unknown:
        raise ValueError(
            f"fsdp_config: {', '.join(unknown)} is none of {', '.join(sorted(_OPTIONS))}"
        )
    found = {"ACCELERATE_MIXED_PRECISION": str(config.mixed_precision or "no")}
    if given or str(config.distributed_type).endswith("FSDP"):
        found["ACCELERATE_USE_FSDP"] = "true"
    for name, value in given.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found[_VARIABLES.get(name, name.upper())] = text
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; raises what the script raises on a rank, see :func:`xla_fsdp.launch`."""
    parser = argparse.ArgumentParser(prog="python -m xla_fsdp.integrations.launch")
    parser.add_argument("--config_file", help="as accelerate config wrote it; default: its own")
    parser.add_argument(
        "--num_processes",
        type=int,
        help="CPU ranks, 1 to 8; default: what the file says. A TPU has as many as it has chips",
    )
    parser.add_argument("script", help="a file with a function main, or what the file names")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    try:
        config = load_config_from_file(options.config_file)
        if not isinstance(config, ClusterConfig):
            raise ValueError("the config file is for SageMaker, which has no TPUs")
        variables = environment_of(config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not os.path.isfile(options.script):
        parser.error(f"{options.script}: there is no such file")
    os.environ.update(variables)
    on_cpu = os.environ.get("PJRT_DEVICE", "").startswith("CPU") or not tpu.num_available_chips()
    ranks = options.num_processes or max(config.num_processes, 1)
    function = config.main_training_function or "main"
    sys.argv = [options.script, *options.arguments]
    launch(
        run_script,
        (os.path.abspath(options.script), function, options.arguments),
        num_devices=ranks if on_cpu else None,
    )


if __name__ == "__main__":
    main()
