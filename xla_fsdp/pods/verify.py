"""``xla_fsdp.verify``: tests and measures a machine, and compares it with the expected results."""

from __future__ import annotations

import math
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy

from .. import xlac
from ..compiled.cache import platform_of_ranks
from ..extras import installed_versions
from ..planning.reporting.tables import milliseconds
from ..ranks.launch import cpu_runtime
from ..tpu.calibration import Calibration
from ..tpu.topology import Slice, resolve
from .commands import run_all
from .findings import Finding, Status, failed, ok, skipped
from .measurements import CollectiveTime, Job, Machine, Rate, StepRun, read_notes
from .microbenchmarks import modelled
from .node import slice_of_type
from .parity import CASES
from .privacy import scrubbed, shown_environment
from .stages import STAGES
from .steps import IN_TREE, ON_CPU, ON_TPU, OURS
from .verification_report import Verification

_SHORTEST = 30.0  # seconds
# Allowed shares of the published or modelled figure.
_FIGURE = (0.75, 1.1)
_STEP = (0.6, 1.6)
_MEMORY = (0.5, 1.1)
# The two classes sum bfloat16 in a different order.
_LOSSES = 2e-2
# Seconds until the other ranks must end.
_DEATH = 60.0
_FIGURES = 3  # of links: launch, hop, 1 / W
_PACKAGES = ("xla_fsdp", "torch", "torch_xla", "libtpu", "jax", "jaxlib", "numpy")


def verify(
    *,
    num_devices: int | None = None,
    ckpt_dir: str | os.PathLike[str] | None = None,
    seconds: float = 600.0,
    stages: Sequence[str] = tuple(STAGES),
    cases: Sequence[str] = (),
    sizes: Sequence[str] = (),
    topology: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Verification:
    """Tests this package on the devices of this machine, and measures the devices.

    It works on a TPU slice and on CPU ranks. The tests compare sharded with unsharded training,
    load a checkpoint, check that a second start finds its compiled programs, and let a rank fail.
    The measurements are memory, matrix unit, link to the host, collectives, and three small steps.

    Everything runs in separate processes: call it from a main program that has used no XLA device.
    On several hosts, call it on all of them; the host with rank 0 gets the report.

    Args:
        num_devices: the number of ranks, as for :func:`xla_fsdp.launch`.
        ckpt_dir: a folder for the checkpoint that all hosts share; default: a temporary one.
        seconds: the total time limit, at least 30. A stage that runs then is ended, and FAILED;
            later ones are skipped.
        stages: the stages to run, of ``programs``, ``parity``, ``checkpoints``, ``rates``,
            ``collectives``, ``steps``; default: all.
        cases: names of ways to shard (``parity``); default: all.
        sizes: names of steps (``steps``); default: all for this kind of device.
        topology: the slice to plan the steps for; default: this one, none on CPU ranks.
        say: called with text about the progress.

    Returns:
        ``print`` the report, or use its ``save``, ``plot``, ``calibration`` and ``ok``.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: this process has already started XLA's runtime.
    """
    slice = None if topology is None else resolve(topology)
    _require_known(stages, cases, sizes, seconds, num_devices)
    until = time.time() + seconds
    with tempfile.TemporaryDirectory(prefix="xla_fsdp-verify-") as name:
        folder = Path(name)
        job = Job(
            stages=tuple(stages),
            folder=name,
            ckpt_dir=os.fspath(ckpt_dir) if ckpt_dir is not None else str(folder / "checkpoints"),
            until=until - 0.25 * seconds,  # for the second start and plans
            cases=cases,
            sizes=sizes,
            num_devices=num_devices,
        )
        children = Children(folder, until, say or (lambda text: None))
        children.run_stages(job)
        if "programs" in stages:
            children.start_again(job)
        where = describe_machine(read_notes(folder, "where"))
        if not where.ranks and not children.failures:
            reason = "rank 0 runs on another host, which has the report"
            children.failures.append(skipped("report", reason))
        if "steps" in stages:
            children.plan(job, where, slice)
        return judge(folder, children.failures, where, slice, stages)


def _require_known(
    stages: Sequence[str],
    cases: Sequence[str],
    sizes: Sequence[str],
    seconds: float,
    num_devices: int | None,
) -> None:
    for what, given, known in (
        ("stages", stages, list(STAGES)),
        ("cases", cases, [case.name for case in CASES]),
        ("sizes", sizes, [*ON_TPU, *ON_CPU]),
    ):
        wrong = [name for name in given if name not in known]
        if wrong or isinstance(given, str):
            raise ValueError(
                f"{what} has unknown names, {wrong or given!r}; allowed is a list of "
                f"{', '.join(known)}"
            )
    if num_devices is not None and (type(num_devices) is not int or num_devices < 1):
        raise ValueError(f"num_devices must be a number of ranks from 1 on, got {num_devices!r}")
    if platform_of_ranks() == "CPU":
        cpu_runtime.size_for(num_devices)
    if not isinstance(seconds, (int, float)) or not seconds >= _SHORTEST:
        raise ValueError(f"seconds must be at least {_SHORTEST:.0f}, got {seconds!r}")
    if xlac.runtime_has_started():
        raise RuntimeError(
            "this process has already started XLA's runtime, which occupies the devices that the "
            "processes of verify need. Call verify before anything uses an XLA device"
        )


class Children:
    """Runs child processes (``stages.main``), one after the other."""

    def __init__(self, folder: Path, until: float, say: Callable[[str], None]) -> None:
        self.folder, self.until, self.say = folder, until, say
        self.failures: list[Finding] = []

    def run_stages(self, job: Job) -> None:
        """After a stage that fails, the others run in a new process."""
        left = list(job.stages)
        while left:
            before = len(read_notes(self.folder, "done"))
            problem = self._run("ranks", replace(job, stages=tuple(left)), ", ".join(left))
            done = len(read_notes(self.folder, "done")) - before
            if not problem:
                return
            remedy = "the message is from the rank that failed; report it with this file"
            if time.time() >= self.until:
                remedy = "allow more --seconds; if the stage does not end then, report it"
            stage = [*left, "the end"][done]
            self.failures.append(failed(stage, problem, "it ends well", remedy))
            left = left[done + 1 :]
            if time.time() > self.until:
                return

    def start_again(self, job: Job) -> None:
        """Starts ranks that must find their programs, and lets one fail."""
        again = replace(job, stages=("programs",))
        problem = self._run("again", again, "a second start, and a rank that dies")
        if problem:
            self.failures.append(failed("second start", problem, "it ends well"))

    def plan(self, job: Job, where: Machine, slice: Slice | None) -> None:
        name = "plans of the steps"
        if slice is None and where.topology:
            slice = resolve(where.topology)
        if slice is None:
            found = "skipped on CPU ranks, because a plan is for a TPU: choose one with topology"
            self.failures.append(skipped(name, found))
            return
        wanted = job.sizes or tuple(ON_CPU if where.family == "cpu" else ON_TPU)
        # Tracing must not occupy the ranks' devices.
        planned = replace(job, sizes=wanted, topology=slice.name)
        problem = self._run("plan", planned, "plans", {"PJRT_DEVICE": "CPU"})
        if problem:
            self.failures.append(skipped(name, problem))

    def _run(
        self, what: str, job: Job, shown: str, more: Mapping[str, str] | None = None
    ) -> str | None:
        """Returns the problem, or ``None``."""
        self.say(shown)
        number = len(list(self.folder.glob("*.job")))
        path = self.folder / f"{number:02}.job"
        path.write_bytes(pickle.dumps(replace(job, notes=str(path.with_suffix(".notes")))))
        command = [sys.executable, "-m", "xla_fsdp.pods.stages", what, str(path)]
        seconds = max(1.0, self.until - time.time())
        environment = {**os.environ, **(more or {})}
        outcome = run_all({0: command}, seconds, environment=environment, kill_rest=True)[0]
        if outcome.code == 0:
            return None
        if outcome.code is None:
            end = "was still running at the time limit; its last message"
        else:
            end = f"ended with {outcome.code}"
        return scrubbed(f"{end}: {outcome.reason}")


def describe_machine(found: Sequence[tuple[str, str, int, str]]) -> Machine:
    """0 ranks if ``found`` is empty."""
    versions = installed_versions(*_PACKAGES)
    return Machine(
        *(found[0] if found else ("", "cpu", 0, "")),
        versions={name: version for name, version in versions.items() if version},
        environment=shown_environment(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def judge(
    folder: Path,
    failures: Sequence[Finding],
    where: Machine,
    asked: Slice | None,
    stages: Sequence[str],
) -> Verification:
    """Creates the report from the results of the stages in ``folder``.

    ``failures``: of the child processes; ``asked``: the slice that the user chose for plans.
    """
    slice = slice_of_type(where.topology)
    rates, times = read_notes(folder, "rate"), read_notes(folder, "collective")
    plans = {name: planned for name, *planned in read_notes(folder, "plan")}
    runs = [
        replace(run, planned=plans[run.name][0], planned_hbm=plans[run.name][1])
        if run.name in plans and run.lane == OURS
        else run
        for run in read_notes(folder, "step")
    ]
    findings = [*failures, *read_notes(folder, "finding")]
    if "programs" in stages:
        uncached = read_notes(folder, "uncached")
        findings.append(
            skipped("compiled programs", uncached[0])
            if uncached
            else judge_programs(read_notes(folder, "programs"))
        )
    findings += [judge_death(note, where.ranks) for note in read_notes(folder, "death")]
    findings += [finding for rate in rates for finding in judge_rate(rate)]
    findings += judge_collectives(times)
    findings += judge_steps(runs, where.family != "cpu")
    about = {**where.versions, "device": where.device, "date": where.date}
    about["topology"] = where.topology or "unknown"
    return Verification(
        where=where,
        findings=tuple(replace(each, found=scrubbed(each.found)) for each in findings),
        rates=tuple(rates),
        collectives=tuple(times),
        steps=tuple(runs),
        calibration=replace(calibrate(where.family, times, rates, slice), about=about),
        planned_for=asked.name if asked else where.topology,
    )


def judge_programs(notes: Sequence[Mapping[str, Any]]) -> Finding:
    name = "compiled programs"
    if len(notes) < 2:
        return skipped(name, f"{len(notes)} of 2 starts trained")
    first, second = notes[0], notes[1]
    found = (
        f"first start: {first['compiled']} compiled; second: {second['compiled']} compiled, "
        f"{second['cached']} found"
    )
    expected = "a second start compiles nothing, and its losses are bitwise equal"
    if first["losses"] != second["losses"]:
        remedy = "do not use enable_compilation_cache here; report it with this file"
        return failed(name, f"{found}; the losses differ", expected, remedy)
    return _judged(name, not second["compiled"], found, expected)


def judge_death(note: Mapping[str, Any], ranks: int) -> Finding:
    name = f"a rank that {note['way']}"
    expected = f"the launch raises RankError within {_DEATH:.0f} s, on all hosts"
    found = f"{note['error'] or 'no error'} after {note['seconds']:.1f} s"
    right = note["error"] and (note["way"] != "raises" or note["rank"] == ranks - 1)
    if right and note["seconds"] < _DEATH:
        return ok(name, found, expected)
    remedy = "monitor jobs on this machine externally; report it with this file"
    return failed(name, found, expected, remedy)


def _judged(name: str, is_close: bool, found: str, expected: str) -> Finding:
    return Finding(Status.OK if is_close else Status.DIFFERENT, name, found, expected)


def _is_within(share: float, allowed: tuple[float, float]) -> bool:
    return allowed[0] <= share <= allowed[1]


def judge_rate(rate: Rate) -> Iterator[Finding]:
    if rate.published is None:
        return
    share = rate.value / rate.published
    small = rate.unit == "FLOP" and rate.amount < 1e11  # too small for full use
    yield _judged(
        rate.name,
        small or _is_within(share, _FIGURE),
        f"{rate.value / 1e9:,.0f} G{rate.unit}/s, {share:.0%} of the published figure",
        f"{rate.published / 1e9:,.0f} G{rate.unit}/s at most",
    )


def judge_collectives(times: Sequence[CollectiveTime]) -> Iterator[Finding]:
    """Compares the largest size of each kind and axis with the model."""
    largest: dict[tuple[str, str], CollectiveTime] = {}
    for one in sorted(times, key=lambda one: one.bytes):
        largest[one.kind, one.axis] = one
    for (kind, axis), one in largest.items():
        if one.modelled is None:
            continue
        share = one.modelled / one.seconds
        yield _judged(
            f"{kind}, {axis}",
            _is_within(share, _FIGURE),
            f"{one.bytes / 1e6:.0f} MB in {milliseconds(one.seconds, 3)}, "
            f"{share:.0%} of the modelled speed",
            f"{milliseconds(one.modelled, 3)} with the published link speeds",
        )


def judge_steps(runs: Sequence[StepRun], on_tpu: bool) -> Iterator[Finding]:
    """Compares both classes, and on a TPU each step with its plan."""
    for name in dict.fromkeys(run.name for run in runs):
        by_lane = {run.lane: run for run in runs if run.name == name}
        ours, other = by_lane.get(OURS), by_lane.get(IN_TREE)
        if ours is None:
            continue
        if other is not None:
            yield _compare_with_intree(name, ours, other)
        if ours.planned is not None and not on_tpu:
            found = f"{milliseconds(ours.seconds)} on CPU ranks, {milliseconds(ours.planned)} in"
            yield skipped(f"plan of {name}", f"{found} a plan for another device")
        elif ours.planned is not None:
            yield _compare_with_plan(name, ours, ours.planned)
        if on_tpu and ours.hbm is not None and ours.planned_hbm is not None:
            share = ours.hbm / ours.planned_hbm
            mib = ours.hbm / 2**20
            yield _judged(
                f"HBM of {name}",
                _is_within(share, _MEMORY),
                f"peak of {mib:,.0f} MiB since the process began, {share:.2f} x of the plan",
                f"{ours.planned_hbm / 2**20:,.0f} MiB required by the plan",
            )


def _compare_with_intree(name: str, ours: StepRun, other: StepRun) -> Finding:
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, other.losses, strict=True))
    found = (
        f"{milliseconds(ours.seconds)}, in-tree {milliseconds(other.seconds)} "
        f"({other.seconds / ours.seconds:.2f} x); losses differ by {apart:.1e}"
    )
    title, expected = f"step {name}", "not slower than in-tree; the same losses"
    if not apart <= _LOSSES:
        remedy = "one of the two computes wrong losses here; report it with this file"
        return failed(title, found, expected, remedy)
    return _judged(title, ours.seconds <= 1.05 * other.seconds, found, expected)


def _compare_with_plan(name: str, ours: StepRun, planned: float) -> Finding:
    share = ours.seconds / planned
    found = f"{milliseconds(ours.seconds)}, {share:.2f} x of the plan"
    if ours.host > 0.9 * ours.seconds:
        found += f"; tracing on the host takes {milliseconds(ours.host)}, which limits the step"
    expected = f"{milliseconds(planned)} by the plan"
    return _judged(f"plan of {name}", _is_within(share, _STEP), found, expected)


def calibrate(
    family: str, times: Sequence[CollectiveTime], rates: Sequence[Rate], slice: Slice | None
) -> Calibration:
    """The figures that fit best; ``None`` for those without a measurement."""
    launch, hop, bandwidth = (None, None, None) if slice is None else _fit_links(times, slice)
    devices = 1 if slice is None else slice.chip.devices
    best = {rate.name: rate.value for rate in rates}
    hbm = best.get("HBM, read and written")
    peak = max((rate.value for rate in rates if rate.unit == "FLOP"), default=None)
    return Calibration(
        family=family,
        link_bandwidth=bandwidth,
        launch_latency=launch,
        hop_latency=hop,
        hbm_bandwidth=hbm and hbm * devices,  # of a chip
        matrix_flops=peak and peak * devices,
        to_device=best.get("host to device"),
        to_host=best.get("device to host"),
    )


def _fit_links(
    times: Sequence[CollectiveTime], slice: Slice
) -> tuple[float | None, float | None, float | None]:
    """Fits launch and hop latency in seconds, and a link's bytes per second in one direction.

    Groups along one axis only: over several axes the compiler chooses among algorithms.
    """
    lengths = [n for n in slice.device_shape if n > 1]
    along = [t for t in times if t.seconds > 0 and (t.axis != "all" or len(lengths) == 1)]
    rows = [(row, t.seconds) for t in along if (row := _terms(t, slice)) is not None]
    if len({tuple(row) for row, _ in rows}) < _FIGURES:
        return None, None, None
    matrix = numpy.array([[term / seconds for term in row] for row, seconds in rows])
    found = _least_squares(matrix)
    if found is None or not found[2]:
        return None, None, None
    return float(found[0]), float(found[1]), float(1 / found[2])


def _terms(time: CollectiveTime, slice: Slice) -> list[float] | None:
    """Launches, hops, and bytes on the busiest link."""

    def seconds(launch: float = 0.0, hop: float = 0.0, bandwidth: float = math.inf) -> float:
        chip = replace(slice.chip, launch_latency=launch, hop_latency=hop, link_bandwidth=bandwidth)
        return modelled(time, replace(slice, chip=chip)) or 0.0

    if seconds():
        return None
    terms = [seconds(launch=1.0), seconds(hop=1.0), seconds(bandwidth=1.0)]
    return terms if terms[2] else None


def _least_squares(matrix: numpy.ndarray) -> numpy.ndarray | None:
    """``x >= 0`` for which ``matrix @ x`` is closest to ones."""
    best, least = None, math.inf
    for count in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), count):
            part = matrix[:, columns]
            scale = numpy.abs(part).max(axis=0)
            if not scale.all():
                continue
            values = numpy.linalg.lstsq(part / scale, numpy.ones(len(part)), rcond=None)[0] / scale
            error = float(((part @ values - 1) ** 2).sum())
            if (values >= 0).all() and error < least - 1e-12:
                best, least = numpy.zeros(matrix.shape[1]), error
                best[list(columns)] = values
    return best
