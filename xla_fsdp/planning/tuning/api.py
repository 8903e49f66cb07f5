"""``xla_fsdp.tune`` and ``training_step``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compiled.host_options import HostOptions
from ...tpu.calibration import Calibration, calibrated
from ...wording import to_one_line
from ..compiling.compiler import CompileError, Target
from ..compiling.progress import Progress
from ..make_report import make_report
from ..tracing.step import TracedStep, trace_step
from .estimate import Estimates
from .facts import StepFacts, facts_of
from .repeated_blocks import Blocks
from .search import ImpossibleError, Measured, Search, extrapolate, what_would_fit
from .settings import ShallowSettings, ShardingSettings
from .space import DEPTHS, MANY_BLOCKS, Space, checked_search
from .tuning import Tuning

StepWithSettings = Callable[[ShardingSettings], Any]


def tune(
    step: StepWithSettings,
    topology: str,
    *,
    batch: int | Collection[int] | None = None,
    baseline: Callable[[], Any] | None = None,
    search: Mapping[str, Collection[Any]] | None = None,
    budget: int = 8,
    compiler_options: Mapping[str, str] | None = None,
    launcher: str = "xla_fsdp",
    cache: str | os.PathLike[str] | bool = True,
    progress: bool = True,
    title: str = "",
    calibration: Calibration | str | os.PathLike[str] | None = None,
    compiler: str | os.PathLike[str] | None = None,
) -> Tuning:
    """Find the settings with which a training step is fastest on a TPU slice, without a TPU.

    ``step(settings)`` is a step as for :func:`xla_fsdp.plan`, with one argument. It builds model
    and optimizer, shards the model with ``settings`` and runs a training step::

        def step(settings):
            model = settings.wrap(Model(), compute_dtype=torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.zeros(settings.batch, 1024).to("xla")).mean().backward()
            optimizer.step()

        found = xla_fsdp.tune(step, "v5litepod-8", batch=32)
        print(found)
        found.settings.save("settings.json")

    Time and memory of all candidates are estimated from a traced step, and at most ``budget`` of
    them are compiled; figures of deep models are first extrapolated from a few blocks. The result
    is the fastest compiled candidate that fits: by modelled time per sample if ``batch`` is given,
    else per step. Results are cached, so an interrupted search continues.

    Args:
        step: see above. ``settings.batch`` is None unless ``batch`` is given.
        topology: a slice, as for ``plan``.
        batch: samples per device: one number, or several to choose from.
        baseline: your own step, as for :func:`xla_fsdp.plan`, with the first ``batch``. It is
            compiled first, and the answer is settings only if they are faster. Default: ``step``
            with the default settings.
        search: by the name of a setting (of :class:`ShardingSettings`), values to try instead of
            the usual ones; a single one fixes it: ``{"scan": [True], "recompute": ["all"]}``.
        budget: the most compilations; results from the cache count.
        compiler_options, launcher, cache, progress, title, calibration, compiler: as in ``plan``.

    Raises:
        ValueError: ``batch``, ``search`` or ``budget`` has a value that is not allowed; the step
            does not shard its model with this package, or uses ``CPUOffload(stream=True)``.
        UnknownTopologyError, CalibrationError, UnusableCompilerError: (ValueErrors) as ``plan``.
        TypeError: ``step`` is not callable.
        MissingExtraError: (an ImportError) the ``plan`` extra is not installed.
        RuntimeError: called inside a rank of a launch.
    """
    if not callable(step):
        raise TypeError(
            f"step must be a function of ShardingSettings that runs a training step, got {step!r}"
        )
    if baseline is not None and not callable(baseline):
        raise TypeError(
            f"baseline must be a function without arguments that runs a training step, or None; "
            f"got {baseline!r}"
        )
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(f"budget must be a number of compilations from 1 on; got {budget!r}")
    batches = _check_batch(batch)
    wanted = checked_search(search)
    units: tuple[str | int, ...] = wanted.get("units", ("blocks",))
    if "batch" in wanted:
        if batch is not None:
            raise ValueError("batch and search['batch'] exclude each other: leave one out")
        batches = wanted.pop("batch")
    shown = Progress(sys.stderr if progress else None, budget)
    target = Target.of(topology, compiler, launcher, compiler_options, cache, shown, calibration)
    where, modelled = target.where, calibrated(target.where, target.measured)
    steps = _Steps(step, target, shown)
    own, why_no_own = None, ""
    if baseline is not None:
        try:
            own = steps.compile("your own step", baseline, target.host())
        except CompileError as error:
            why_no_own = f"Your own step was not compiled: {to_one_line(error, 200)}"
    with shown.while_doing(f"analysing a step on {where.name}"):
        names: list[str | int] = ["blocks", *(one for one in units if isinstance(one, int))]
        facts = {
            one: facts_of(steps.trace, modelled.chip, where.devices, batches[0], one)
            for one in names
        }
        scans, why_not = _scans(steps.try_trace, wanted, facts["blocks"], batches[0])
        steps.blocks, how_deep = 0, ""
        if False in wanted.get("scan", (False,)):
            steps.blocks, how_deep = _extrapolated(steps.try_trace, facts["blocks"], batches[0])
    space = Space.of(facts["blocks"], modelled, batches, scans, wanted)
    capacity = where.chip.device_usable_hbm_bytes(target.host().chip_config)
    estimates = Estimates(facts, modelled)
    search_ = Search(
        space, estimates, steps.measure, capacity, budget, shown.say,
        own=own, own_batch=batches[0] or 1, compilations=int(baseline is not None),
        host_memory=_available_memory(),
    )  # fmt: skip
    trials = search_.run()
    best = search_.answer()
    advice = []
    if best is None and not (own and own.fits):
        first = trials[0].settings if trials else ShardingSettings(batch=batches[0])
        advice = what_would_fit(first, estimates, where, capacity)
    measured = own or next((trial.measured for trial in trials if trial.measured), None)
    whose = "your own step" if own else "the first compiled row"
    warnings = dict.fromkeys(measured.warnings if measured else ())
    return Tuning(
        settings=best,
        own=own,
        own_batch=batches[0] or 1,
        trials=tuple(trials),
        topology=where.name,
        devices=where.devices,
        capacity=capacity,
        budget=budget,
        compilations=search_.compilations,
        from_cache=steps.from_cache,
        samples=batches[0] is not None,
        advice=tuple(advice),
        notes=(
            *filter(None, (why_no_own, "" if facts["blocks"].blocks else _NO_BLOCKS)),
            *filter(None, (why_not, how_deep)),
            *(f"Warning of {whose}: {one}" for one in warnings),
        ),
        title=title,
    )


_NO_BLOCKS = (
    "The model has no repeated blocks, so it is one unit. Name them by settings.wrap(model, "
    'blocks=...), or give sizes of units by search={"units": [...]}.'
)

# Raised by a step that does not work with some settings or depths.
_NOT_POSSIBLE = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


class _Steps:
    def __init__(self, step: StepWithSettings, target: Target, progress: Progress) -> None:
        self._step, self._target, self._progress = step, target, progress
        self.from_cache = 0
        # The number of blocks to which figures are extrapolated, or 0.
        self.blocks = 0
        # To compile all blocks without a loop, and two programs of few blocks; 0: unknown.
        self._full_seconds = self._few_seconds = 0.0

    def _possible(self, settings: ShardingSettings) -> Callable[[], Any]:
        """A step that raises ImpossibleError if it does not work with ``settings``."""

        def step() -> Any:
            try:
                return self._step(settings)
            except _NOT_POSSIBLE as error:
                raise ImpossibleError(to_one_line(error, 200)) from error

        return step

    def trace(self, settings: ShardingSettings) -> TracedStep:
        """Raises what the step raises."""
        host = self._target.host(settings.compiler_options)
        return self._traced(partial(self._step, settings), host)

    def try_trace(self, settings: ShardingSettings) -> TracedStep:
        """Raises ImpossibleError if the step does not work with ``settings``."""
        return self._traced(self._possible(settings), self._target.host(settings.compiler_options))

    def measure(self, settings: ShardingSettings, full: bool) -> Measured:
        """``full``: with all blocks; otherwise extrapolate where that is possible."""
        host, name = self._target.host(settings.compiler_options), str(settings)
        alike = settings.recompute in ("none", "all") and not settings.kept_blocks
        pays = not self._full_seconds or self._few_seconds < self._full_seconds
        if full or settings.scan or not (self.blocks and alike and pays):
            found = self.compile(name, self._possible(settings), host)
            if not settings.scan:
                self._full_seconds = found.compile_seconds
            return found
        few = [
            self.compile(f"{name}, {one.depth} blocks", self._possible(one), host)
            for one in (ShallowSettings.of(settings, depth) for depth in DEPTHS)
        ]
        self._few_seconds = sum(one.compile_seconds for one in few)
        return extrapolate(few, DEPTHS, self.blocks)

    def compile(self, name: str, step: Callable[[], Any], host: HostOptions) -> Measured:
        target = self._target
        with self._progress.while_doing(f"tracing {name}"):
            traced = self._traced(step, host)
        with self._progress.while_compiling():
            compiled = target.compile(traced.program, host)
        self.from_cache += compiled.from_cache
        report = make_report(target, host, traced, compiled)
        timing, fits = report.timing, report.fits
        return Measured(
            seconds=timing.step if fits else 0.0,
            compute=timing.compute if fits else 0.0,
            exposed=timing.exposed + timing.copies if fits else 0.0,
            hbm=report.memory.required,
            fits=fits,
            mfu=timing.mfu if fits else 0.0,
            compile_seconds=report.compile_seconds,
            from_cache=report.from_cache,
            warnings=report.warnings,
            host_memory=report.compiler_host_memory,
        )

    def _traced(self, step: Callable[[], Any], host: HostOptions) -> TracedStep:
        where = self._target.where
        traced = trace_step(step, 0, where.devices, where, host.arguments)
        if traced.parts:
            raise ValueError(
                "tune searches steps of one program, and CPUOffload(stream=True) makes several: "
                "tune without stream, and plan the settings with it"
            )
        return traced


def _scans(
    trace: Callable[[ShardingSettings], Any],
    wanted: Mapping[str, Collection[Any]],
    facts: StepFacts,
    batch: int | None,
) -> tuple[bool, str]:
    """Whether the blocks can run in one loop, and a note on it or ""."""
    if True not in wanted.get("scan", (True,)) or len(facts.blocks) < 2:
        return False, ""
    try:
        trace(ShardingSettings(batch=batch, scan=True, recompute="all"))
    except ImpossibleError as error:
        return False, f"Blocks cannot be scanned: {error}"
    return True, ""


def _available_memory() -> float:
    """Free bytes of this machine; infinite if unknown."""
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return math.inf


def _extrapolated(
    trace: Callable[[ShardingSettings], TracedStep], facts: StepFacts, batch: int | None
) -> tuple[int, str]:
    """The number of blocks, if figures are extrapolated to them, else 0; and a note on it."""
    blocks = len(facts.blocks)
    if blocks <= MANY_BLOCKS:
        return 0, ""
    try:
        units = len(trace(ShallowSettings(batch=batch, depth=DEPTHS[0])).units)
        if len(facts.units) - units != blocks - DEPTHS[0]:
            raise ImpossibleError(f"without them, {units} of {len(facts.units)} units are left")
    except ImpossibleError as error:
        return 0, f"Every program had all blocks, since none can be left out: {error}"
    return blocks, (
        f"Without scan, figures of {blocks} blocks are first extrapolated from {DEPTHS[0]} and "
        f"{DEPTHS[1]} of them; the best was then compiled with all, or it is marked (extrapolated)."
    )


def _check_batch(batch: int | Collection[int] | None) -> tuple[int | None, ...]:
    given = batch if isinstance(batch, Collection) else (batch,)
    for one in given:
        if one is not None and (isinstance(one, bool) or not isinstance(one, int) or one < 1):
            raise ValueError(
                "batch must be the samples per device, one integer from 1 on or several; got "
                f"{batch!r}"
            )
    if not given or (len(given) > 1 and None in given):
        raise ValueError(f"batch must be one integer, several, or None; got {batch!r}")
    return tuple(dict.fromkeys(given))


def training_step(
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, ShardingSettings], torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    blocks: Blocks = None,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> StepWithSettings:
    """Make a usual training step for :func:`tune`.

    Args:
        model: builds the model, in plain torch; may be on the meta device if its modules have
            ``reset_parameters``.
        loss: ``loss(wrapped, settings)`` makes a batch of ``settings.batch`` samples on the XLA
            device, calls the wrapped model and returns the loss.
        optimizer: ``optimizer(parameters)`` builds the optimizer.
        blocks, options: as for ``ShardingSettings.wrap``.
        clip_grad_norm: the largest gradient norm; None: no clipping.
    """

    def step(settings: ShardingSettings) -> torch.Tensor:
        wrapped: Any = settings.wrap(model(), blocks, **options)
        trainer = optimizer(wrapped.parameters())
        value = loss(wrapped, settings)
        value.backward()
        if clip_grad_norm is not None:
            wrapped.clip_grad_norm_(clip_grad_norm)
        trainer.step()
        trainer.zero_grad()
        return value

    return step
