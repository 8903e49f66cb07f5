"""``xla_fsdp.plan``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ..tpu.calibration import Calibration
from ..tpu.topology import Slice
from .compiling.compiler import Target
from .compiling.progress import Progress
from .make_report import make_report, report_on_parts
from .reporting.report import Report
from .tracing.step import TracedStep, trace_step


def plan(
    step: Callable[[], Any],
    topology: str,
    *,
    ranks: Iterable[int] | None = None,
    compiler_options: Mapping[str, str] | None = None,
    launcher: str = "xla_fsdp",
    cache: str | os.PathLike[str] | bool = True,
    progress: bool = True,
    title: str = "",
    calibration: Calibration | str | os.PathLike[str] | None = None,
    compiler: str | os.PathLike[str] | None = None,
) -> Report:
    """Compiles one training step for a TPU slice, on the real TPU compiler, without a TPU.

    ``step()`` is called once for each traced rank. It builds model and optimizer and runs one
    training step or an entire training loop: tracing stops where the first program with an
    optimizer step would run (``torch_xla.sync()``, ``.item()``, the end of ``step``). Inside
    ``step``, ``xr.world_size()`` and ``xr.global_ordinal()`` are those of the slice. Nothing is
    executed, and large parameters get no values, so the model may be far larger than this machine's
    memory if it is sharded while it is built, or if each of its parts fits. Optimizer state is
    assumed to exist already.

    Args:
        step: a function without arguments; the model may use any wrapper.
        topology: a slice, such as ``v6e-256``, or a raw topology in chips, such as ``v5e:2x4``.
        ranks: which ranks to trace, to check whether all share one executable; the program of the
            first one is compiled. Default: 0, 1 and the last.
        compiler_options: options of the TPU compiler, e.g.
            ``{"xla_tpu_enable_latency_hiding_scheduler": "true"}``. They override those of
            torch_xla, of ``LIBTPU_INIT_ARGS`` in this process, and of ``launcher``.
        launcher: what starts the ranks: ``xla_fsdp`` (``xla_fsdp.launch``, which adds the options
            of :mod:`xla_fsdp.compiler_options`) or ``torch_xla``, which adds none.
        cache: the folder in which results are cached; ``True`` means ``~/.cache/xla_fsdp/plans``,
            ``False`` no cache.
        progress: report progress on standard error.
        title: the title of the report and its pictures.
        calibration: measured figures of such chips, or a file of them that ``python -m
            xla_fsdp.preflight --measure`` wrote. They change only the modelled times.
        compiler: a version of libtpu that ``python -m xla_fsdp.plan_compiler install`` has
            installed, such as ``"0.0.51"``, the folder of a virtual environment with jax and
            libtpu, or an interpreter. Default: the newest tested version that is installed, else
            that of this environment.

    Raises:
        UnknownTopologyError: (a ValueError) no such slice.
        UnusableCompilerError: (a ValueError) ``compiler`` lacks jax or libtpu, or does not know
            the chip.
        MissingExtraError: (an ImportError) the ``plan`` extra is not installed.
        CompileError: the compiler failed for another reason than memory.
        ValueError: the step traces nothing; a rank is not in the slice; libtpu does not accept the
            value of an option.
        CalibrationError: (a ValueError) ``calibration`` is for other chips, or damaged.
        TypeError: ``step`` is not callable.
        RuntimeError: called inside a rank of a launch.
    """
    if not callable(step):
        raise TypeError(
            f"step must be a function without arguments that runs a training step, got {step!r}"
        )
    shown = Progress() if progress else Progress(None)
    target = Target.of(topology, compiler, launcher, compiler_options, cache, shown, calibration)
    where, host = target.where, target.host()
    numbers = _check_ranks(ranks, where)

    def trace(rank: int) -> TracedStep:
        with shown.while_doing(f"tracing rank {rank} of {where.devices}"):
            return trace_step(step, rank, where.devices, where, host.arguments)

    first = trace(numbers[0])
    programs = [part.program for part in first.parts] or [first.program]
    unequal = {id(one): one for one in programs}
    results = {number: target.compile(one, host) for number, one in unequal.items()}
    compiled = [results[id(one)] for one in programs]
    executables = len({first.fingerprint, *(trace(rank).fingerprint for rank in numbers[1:])})

    report_on = partial(
        make_report, target, host, ranks=numbers, executables=executables, title=title
    )
    if not first.parts:
        return report_on(first, compiled[0])
    return report_on_parts(first, compiled, report_on, where.chip.device_flops)


def _check_ranks(ranks: Iterable[int] | None, where: Slice) -> tuple[int, ...]:
    last = where.devices - 1
    if ranks is None:
        return tuple(sorted({0, min(1, last), last}))
    numbers = tuple(ranks) if isinstance(ranks, Iterable) else ()
    if not numbers or any(type(r) is not int or not 0 <= r <= last for r in numbers):
        raise ValueError(
            f"ranks must be a list of numbers from 0 to {last} on {where.name}, got {ranks!r:.80}"
        )
    return numbers
