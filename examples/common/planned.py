"""``--plan``: what a run needs on a TPU slice, instead of the run."""

import os
from collections.abc import Callable
from types import SimpleNamespace

from absl import flags

import xla_fsdp

from . import compiled, script

flags.DEFINE_string(
    "plan",
    None,
    "plan this very run for a TPU slice, e.g. v3-8, v4-128 or v5e:2x4, instead of running it; "
    "needs no TPU. Exit code 0 if it fits, 3 if it does not",
)
flags.DEFINE_multi_string(
    "plan_report", [], "also write the plan there: .json, .png or .html; may be repeated"
)
script.require("plan", bool, "must name a slice, such as v3-8")
script.require(
    "plan_report",
    lambda paths: all(path.endswith((".json", ".png", ".html")) for path in paths),
    "must end in .json, .png or .html",
)
flags.register_multi_flags_validator(
    ["plan", "plan_report"],
    lambda given: given["plan"] or not given["plan_report"],
    "--plan_report needs --plan",
)


def launch_or_plan(
    train: Callable, args: tuple, options: SimpleNamespace, num_devices: int | None, title: str
) -> None:
    """Runs ``train(rank, *args)`` on every rank; with ``--plan``, plans its training step.

    What is compiled for a run is kept, as ``--compilation_cache`` says.

    Raises:
        script.Stop: with code 3 if the planned step does not fit, with code 2 for a slice that does
            not exist, where planning is not installed, and for ranks that there can not be, with
            code 1 if the compiler crashed.
    """
    if not options.plan:
        _require_known_device()
        compiled.switch_on(options)
        try:
            xla_fsdp.launch(train, args, num_devices)
        except ValueError as error:
            # Under torchrun this process is the rank, and the error may be its own.
            if "TORCHELASTIC_RUN_ID" in os.environ:
                raise
            raise script.Stop(str(error), code=2) from error
        return

    for path in options.plan_report:
        parent = os.path.dirname(path) or "."
        there = os.path.isdir(parent) and os.access(parent, os.W_OK)
        if not there or os.path.isdir(path) or "\0" in path:
            raise script.Stop(
                f"--plan_report={path}: {parent} is no folder to write a file of that name in", 2
            )

    def step() -> None:
        import torch_xla.runtime as xr

        train(xr.global_ordinal(), *args)

    try:
        report = xla_fsdp.plan(
            step, topology=options.plan, compiler_options=_given_options(), title=title
        )
    except (xla_fsdp.UnknownTopologyError, xla_fsdp.MissingExtraError) as error:
        raise script.Stop(f"--plan: {error}", code=2) from error
    except xla_fsdp.CompileError as error:
        message = str(error).splitlines()[0]
        raise script.Stop(f"--plan: {message} (options go into LIBTPU_INIT_ARGS)") from error
    print(report)
    try:
        for path in options.plan_report:
            (report.save if path.endswith(".json") else report.plot)(path)
    except (OSError, ImportError) as error:
        raise script.Stop(f"--plan_report: {error}", code=2) from error
    if not report.fits:
        raise script.Stop(report.verdict, code=3)


def _require_known_device() -> None:
    device = os.environ.get("PJRT_DEVICE")
    # None: launch takes a TPU if there is one, else the CPU. CUDA and NEURON come with plugins.
    if device is not None and device.split("_")[0] not in ("CPU", "TPU", "CUDA", "NEURON"):
        raise script.Stop(
            f"PJRT_DEVICE={device}: ranks run on TPU and CPU; set it to one of these, or unset it",
            code=2,
        )


def _given_options() -> dict[str, str]:
    """What the run itself would tell the compiler through its environment."""
    from xla_fsdp.compiler_options import read_libtpu_init_args

    given = read_libtpu_init_args(os.environ.get("LIBTPU_INIT_ARGS", ""))
    return {
        name: value
        for name, value in given.items()
        if value is not None and name.startswith("xla_")
    }
