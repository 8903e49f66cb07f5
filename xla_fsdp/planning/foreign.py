"""Plans a step that this package did not trace: one program for all devices, partitioned by XLA.

``jax.jit`` with shardings and torch_xla's SPMD mode lower one program that computes on whole
arrays; the compiler splits it over the devices. Whoever lowers it hands over StableHLO and what a
plan cannot read off it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .api import make_report
from .compiling.cache import PlanCache
from .compiling.compiler import compile_partitioned, require_extra
from .compiling.progress import Progress
from .reporting.report import Report
from .slices.topology import resolve
from .tracing.bound import ZeroBound
from .tracing.step import TracedStep
from .tracing.traced import TracedProgram


@dataclass(frozen=True)
class PartitionedProgram:
    """One training step on all devices.

    Attributes:
        stablehlo: the module, as text or bytecode; its arguments carry shardings over ``devices``.
        fingerprint: the same for programs that differ in nothing but files and lines.
        shardy: shardings are of the ``sdy`` dialect, not ``mhlo.sharding``.
        devices: how many it is sharded over.
        arguments: what each argument is; state of the optimizer is called ``exp_avg of NAME``.
        donated: argument number to the number of the output that may take its buffer.
        elements: of all trained parameters.
        itemsize: bytes of an element in the dtype that parameters are computed in.
        model_flops: of a step on one device, by the convention of ``program/flops.py``.
    """

    stablehlo: bytes
    fingerprint: str
    shardy: bool
    devices: int
    arguments: tuple[str, ...]
    donated: Mapping[int, int]
    elements: int
    itemsize: int
    model_flops: float

    @property
    def bound(self) -> ZeroBound:
        """What ZeRO-3 training of the same parameters must send, as ``tracing/bound.py`` has it."""
        sent = 3 * self.elements * self.itemsize * (self.devices - 1) / self.devices
        label = "two all-gathers and one reduce-scatter of every parameter (ZeRO-3)"
        return ZeroBound(round(sent), self.elements, label)


def plan_partitioned(
    program: PartitionedProgram,
    topology: str,
    *,
    compiler_options: Mapping[str, str] | None = None,
    cache: str | os.PathLike[str] | bool = True,
    progress: bool = True,
    title: str = "",
) -> Report:
    """What ``program`` needs on a slice: :func:`xla_fsdp.plan` for what others lowered.

    Raises:
        UnknownTopologyError, MissingExtraError, CompileError: as ``plan`` does.
        ValueError: the program is for another number of devices.
    """
    where = resolve(topology)
    require_extra()
    if program.devices != where.devices:
        raise ValueError(
            f"the program is sharded over {program.devices} devices and {where.name} has "
            f"{where.devices}: lower it for a mesh of that many"
        )
    shown = Progress() if progress else Progress(None)
    kept = PlanCache.at(cache)
    compiled = compile_partitioned(program, where, compiler_options or {}, kept, shown)
    traced = TracedProgram(program.stablehlo, program.donated, program.arguments)
    step = TracedStep(traced, program.bound, (), 0, has_optimizer=True)
    return make_report(where, compiled, step, ranks=(0,), executables=1, title=title)
