"""``python -m xla_fsdp.integrations.launch --config_file fsdp.yaml script.py ...``

What ``accelerate launch`` is for GPUs: runs a script's ``main`` on every rank, of the CPU or of
a TPU, under the configuration that ``accelerate config`` has written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import xlac
from ..ranks.launch import launch
from .config_file import environment_of, read_config
from .script import import_integrations, run_script


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
        config = read_config(options.config_file)
        variables = environment_of(config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if config.use_cpu:
        variables["PJRT_DEVICE"] = "CPU"
    if not os.path.isfile(options.script):
        parser.error(f"{options.script}: there is no such file")
    os.environ.update(variables)
    on_cpu = os.environ.get("PJRT_DEVICE", "").startswith("CPU") or not xlac.chips_of_host()
    ranks = options.num_processes or config.num_processes
    if on_cpu and not 1 <= ranks <= 8:
        parser.error(
            f"{ranks} CPU ranks are not possible: write num_processes: 1 to 8 into the config "
            "file, or pass --num_processes"
            if ranks != -1
            else "the config file has no num_processes: write it, or pass --num_processes"
        )
    function = config.main_training_function or "main"
    sys.argv = [options.script, *options.arguments]
    if on_cpu:
        import_integrations()
    launch(
        run_script,
        (os.path.abspath(options.script), function, options.arguments),
        num_devices=ranks if on_cpu else None,
    )


if __name__ == "__main__":
    main()
