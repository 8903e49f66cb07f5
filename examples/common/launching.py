"""Starts ranks, or with ``--plan`` plans their training step; can store compiled programs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from absl import flags

import xla_fsdp
from xla_fsdp.compiler_options import RefusedOptionError

from .script import Stop, require, to_one_line

flags.DEFINE_integer("num_devices", None, "number of ranks; default: 4 on CPU, all on TPU", 1, 8)
flags.DEFINE_string(
    "plan",
    None,
    "plan this run for a TPU slice, e.g. v3-8, v4-128 or v5e:2x4, instead of running it; needs no "
    "TPU. Exit code 0 if it fits into memory, 3 if it does not",
)
flags.DEFINE_multi_string(
    "plan_report", [], "write the plan to a .json, .png or .html file; repeatable"
)
flags.DEFINE_string(
    "calibration", None, "for a plan: the chip's figures, a file written by preflight --measure"
)
flags.DEFINE_string(
    "compilation_cache", "none", "folder for compiled programs, so that the next start is quick"
)
require("plan", bool, "must name a slice, such as v3-8")
require(
    "calibration",
    lambda _: any(name in flags.FLAGS and flags.FLAGS[name].value for name in ("plan", "tune")),
    "is for a plan: also give --plan=SLICE",
)
require(
    "plan_report",
    lambda paths: all(path.endswith((".json", ".png", ".html")) for path in paths),
    "must end in .json, .png or .html",
)
require("compilation_cache", str.strip, "is blank; name a folder, or none")
flags.register_multi_flags_validator(
    ["plan", "plan_report"],
    lambda given: given["plan"] or not given["plan_report"],
    "--plan_report needs --plan",
)


def launch_or_plan(train: Callable, args: tuple, title: str) -> None:
    """Runs ``train(rank, *args)`` on every rank; with ``--plan``, plans its training step.

    The first of ``args`` is ``options``. A plan that does not fit ends the script with code 3.
    """
    options: SimpleNamespace = args[0]
    if options.plan:
        return _plan(train, args, title)
    device = os.environ.get("PJRT_DEVICE")
    # None: launch uses a TPU if there is one, else the CPU. CUDA and NEURON need plugins.
    if device is not None and device.split("_")[0] not in ("CPU", "TPU", "CUDA", "NEURON"):
        raise Stop(
            f"PJRT_DEVICE={device} is not supported; set it to TPU or CPU, or unset it", code=2
        )
    _enable_compilation_cache(options)
    try:
        xla_fsdp.launch(train, args, options.num_devices)
    except ValueError as error:
        # Under torchrun this process is a rank, and the error may come from its training.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise
        raise Stop(str(error), code=2) from error


@contextmanager
def refusals(flag: str, options: SimpleNamespace) -> Iterator[None]:
    """A context in which errors of a plan end the script with one line."""
    try:
        if options.calibration:
            xla_fsdp.Calibration.load(options.calibration)
    except (xla_fsdp.CalibrationError, OSError) as error:
        raise Stop(f"--calibration={options.calibration}: {to_one_line(error)}", code=2) from error
    try:
        yield
    except (
        RefusedOptionError,
        xla_fsdp.CalibrationError,
        xla_fsdp.MissingExtraError,
        xla_fsdp.UnknownTopologyError,
        xla_fsdp.UnusableCompilerError,
    ) as error:
        raise Stop(f"{flag}: {error}", code=2) from error
    except xla_fsdp.CompileError as error:
        raise Stop(
            f"{flag}: {str(error).splitlines()[0]} (options go into LIBTPU_INIT_ARGS)"
        ) from error


def call_as_rank(train: Callable, *args: object) -> None:
    """Calls ``train(rank, *args)`` in the simulated rank of a plan."""
    import torch_xla.runtime as xr

    train(xr.global_ordinal(), *args)


def _plan(train: Callable, args: tuple, title: str) -> None:
    options: SimpleNamespace = args[0]
    for path in options.plan_report:
        folder = os.path.dirname(path) or "."
        writable = os.path.isdir(folder) and os.access(folder, os.W_OK)
        if not writable or os.path.isdir(path) or "\0" in path:
            raise Stop(
                f"--plan_report={path}: this file cannot be written; give a file name in a "
                "writable folder",
                code=2,
            )

    with refusals("--plan", options):
        report = xla_fsdp.plan(
            partial(call_as_rank, train, *args),
            topology=options.plan,
            title=title,
            calibration=options.calibration,
        )
    print(report)
    try:
        for path in options.plan_report:
            (report.save if path.endswith(".json") else report.plot)(path)
    except (OSError, ImportError) as error:
        raise Stop(f"--plan_report: {error}", code=2) from error
    if not report.fits:
        raise Stop(report.verdict, code=3)


def _enable_compilation_cache(options: SimpleNamespace) -> None:
    """Sets ``options.compilation_cache`` to the folder of the cache, or leaves "none"."""
    folder = options.compilation_cache
    if folder == "none":
        return
    if options.profile_steps:
        raise Stop(
            f"--compilation_cache={folder} excludes --profile_steps: programs in the cache may "
            "have been compiled without names",
            code=2,
        )
    try:
        options.compilation_cache = str(xla_fsdp.enable_compilation_cache(folder))
    except (OSError, ValueError, NotImplementedError) as error:
        raise Stop(f"--compilation_cache={folder}: {to_one_line(error)}", code=2) from error
