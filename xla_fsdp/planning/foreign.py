"""Plans one program for all devices, partitioned by XLA (``jax.jit``, torch_xla's SPMD mode)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .compiling.compiler import Target
from .compiling.progress import Progress
from .make_report import make_report
from .reporting.report import Report
from .tracing.step import TracedStep
from .tracing.traced import PartitionedProgram, TracedProgram


def plan_partitioned(
    program: PartitionedProgram,
    topology: str,
    *,
    compiler_options: Mapping[str, str] | None = None,
    launcher: str = "other",
    cache: str | os.PathLike[str] | bool = True,
    progress: bool = True,
    title: str = "",
    compiler: str | os.PathLike[str] | None = None,
) -> Report:
    """:func:`xla_fsdp.plan` for a program that others lowered; other arguments are as in ``plan``.

    ``launcher``: as in ``plan``, or ``other`` for programs that do not import torch_xla. Raises as
    ``plan``, and ValueError if the program is for another number of devices.
    """
    shown = Progress() if progress else Progress(None)
    target = Target.of(topology, compiler, launcher, compiler_options, cache, shown)
    where, host = target.where, target.host()
    if program.devices != where.devices:
        raise ValueError(
            f"the program is sharded over {program.devices} devices and {where.name} has "
            f"{where.devices}: lower it for a mesh of {where.devices} devices"
        )
    traced = TracedProgram(program.stablehlo, program.donated, program.arguments)
    step = TracedStep(traced, program.bound, (), 0, has_optimizer=True)
    return make_report(target, host, step, target.compile(program, host), title=title)
