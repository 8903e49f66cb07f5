"""Creates the report from the measurements: the findings and a calibration.

The calibration has the figures that the time model needs. The model's seconds of a collective are
``launch + hops * hop + load / W`` (``tpu/links.py``). The hops and load of each measured collective
come from the same model. So no other figures make plans closer to the measured times.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime, timezone
from importlib import metadata
from itertools import combinations
from typing import Any

import numpy

from ..planning.reporting.report import Report
from ..planning.reporting.tables import milliseconds
from ..tpu.calibration import Calibration
from ..tpu.topology import Slice, UnknownTopologyError, resolve
from .microbenchmarks import modelled
from .privacy import scrubbed, shown_environment
from .records import CollectiveTime, Finding, Machine, Rate, Status, StepRun
from .report import Verification
from .steps import OURS

# The allowed range of a measurement, as a share of the published or modelled figure.
_FIGURE = (0.75, 1.1)
_STEP = (0.6, 1.6)
_MEMORY = (0.5, 1.1)
# The allowed loss difference between both classes: they sum bfloat16 in a different order.
_LOSSES = 2e-2
# Seconds within which the other ranks must end.
_DEATH = 60.0
_FIGURES = 3  # of links: launch, hop, 1 / W
_PACKAGES = ("xla_fsdp", "torch", "torch_xla", "libtpu", "jax", "jaxlib", "numpy")


Notes = Callable[[str], list[dict[str, Any]]]


def describe_machine(notes: Sequence[Mapping[str, Any]]) -> Machine:
    """The machine and software, from the first note about them."""
    found = notes[0] if notes else {"device": "", "family": "cpu", "ranks": 0, "topology": ""}
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions["python"] = sys.version.split()[0]
    return Machine(
        device=str(found["device"]),
        family=str(found["family"]),
        ranks=int(found["ranks"]),
        topology=str(found["topology"]),
        versions=versions,
        environment=shown_environment(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def judge(
    notes: Notes,
    failures: Sequence[Finding],
    where: Machine,
    asked: Slice | None,
    stages: Sequence[str],
) -> Verification:
    """Creates the report from the notes of the stages.

    Args:
        notes: returns all notes of a kind, in the order in which they were written.
        failures: findings from running the child processes.
        asked: the slice for which the steps were planned, if the user chose one.
    """
    slice = None
    with contextlib.suppress(UnknownTopologyError):
        slice = resolve(where.topology) if where.topology else None
    rates = [_of(Rate, note) for note in notes("rate")]
    times = [
        replace(time, groups=tuple(map(tuple, time.groups)))
        for time in (_of(CollectiveTime, note) for note in notes("collective"))
    ]
    runs = _planned([_of(StepRun, note) for note in notes("step")], notes)
    findings = [
        replace(found, found=scrubbed(found.found))
        for found in (_of(Finding, note) for note in notes("finding"))
    ]
    findings = [replace(found, status=Status(found.status)) for found in findings]
    if "programs" in stages:
        uncached = notes("uncached")
        if uncached:
            skipped = Finding(Status.SKIPPED, "compiled programs", scrubbed(uncached[0]["error"]))
            findings.append(skipped)
        else:
            findings.append(programs(notes("programs")))
    findings += [death(note, where.ranks) for note in notes("death")]
    for rate in rates:
        findings += of_rate(rate)
    findings += of_collectives(times)
    findings += of_steps(runs, where.family != "cpu")
    for note in notes("unplanned"):
        found = scrubbed(note["error"])
        findings.append(Finding(Status.SKIPPED, f"plan of {note['name']}", found))
    calibration = calibrate(where.family, times, rates, slice)
    about = {**where.versions, "device": where.device, "date": where.date}
    about["topology"] = where.topology or "unknown"
    return Verification(
        where=where,
        findings=tuple([*failures, *findings]),
        rates=tuple(rates),
        collectives=tuple(times),
        steps=tuple(runs),
        calibration=replace(calibration, about=about),
        planned_for=asked.name if asked else where.topology,
    )


def _planned(runs: list[StepRun], notes: Notes) -> list[StepRun]:
    """Adds the figures of the plans to the runs; on CPU ranks a plan is for other hardware."""
    plans = {note["name"]: Report.load(note["path"]) for note in notes("plan")}
    return [
        replace(
            one,
            planned=plans[one.name].timing.step,
            planned_hbm=plans[one.name].memory.required,
        )
        if one.name in plans and one.lane == OURS
        else one
        for one in runs
    ]


def _of(kind: type, note: Mapping[str, Any]) -> Any:
    names = {one.name for one in fields(kind)}
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in note.items()
            if name in names
        }
    )


def programs(notes: Sequence[Mapping[str, Any]]) -> Finding:
    """The finding about the programs that two starts compiled."""
    name = "compiled programs"
    if len(notes) < 2:
        return Finding(Status.SKIPPED, name, f"{len(notes)} of 2 starts trained")
    first, second = notes[0], notes[1]
    found = (
        f"first start: {first['compiled']} compiled; second: {second['compiled']} compiled, "
        f"{second['cached']} found"
    )
    expected = "a second start compiles nothing, and its losses are bitwise equal"
    if first["losses"] != second["losses"]:
        remedy = "do not use enable_compilation_cache here; report it with this file"
        return Finding(Status.FAILED, name, f"{found}; the losses differ", expected, remedy)
    if second["compiled"]:
        return Finding(Status.DIFFERENT, name, found, expected)
    return Finding(Status.OK, name, found, expected)


def death(note: Mapping[str, Any], ranks: int) -> Finding:
    """The finding about a launch in which the last rank failed."""
    name = f"a rank that {note['way']}"
    expected = f"the launch raises RankError within {_DEATH:.0f} s, on all hosts"
    found = f"{note['error'] or 'no error'} after {note['seconds']:.1f} s"
    right = note["error"] and (note["way"] != "raises" or note["rank"] == ranks - 1)
    if right and note["seconds"] < _DEATH:
        return Finding(Status.OK, name, found, expected)
    remedy = "monitor jobs on this machine externally; report it with this file"
    return Finding(Status.FAILED, name, found, expected, remedy)


def of_rate(rate: Rate) -> Iterator[Finding]:
    if rate.published is None:
        return
    share = rate.value / rate.published
    is_close = _FIGURE[0] <= share <= _FIGURE[1]
    small = rate.unit == "FLOP" and rate.amount < 1e11  # too small for full use of the unit
    yield Finding(
        Status.OK if is_close or small else Status.DIFFERENT,
        rate.name,
        f"{rate.value / 1e9:,.0f} G{rate.unit}/s, {share:.0%} of the published figure",
        f"{rate.published / 1e9:,.0f} G{rate.unit}/s at most",
    )


def of_collectives(times: Sequence[CollectiveTime]) -> Iterator[Finding]:
    """One finding for each kind and axis: compares the largest size with the model."""
    groups: dict[tuple[str, str], list[CollectiveTime]] = {}
    for time in times:
        groups.setdefault((time.kind, time.axis), []).append(time)
    for (kind, axis), some in groups.items():
        largest = max(some, key=lambda time: time.bytes)
        if largest.modelled is None:
            continue
        share = largest.modelled / largest.seconds
        is_close = _FIGURE[0] <= share <= _FIGURE[1]
        yield Finding(
            Status.OK if is_close else Status.DIFFERENT,
            f"{kind}, {axis}",
            f"{largest.bytes / 1e6:.0f} MB in {milliseconds(largest.seconds, 3)}, "
            f"{share:.0%} of the modelled speed",
            f"{milliseconds(largest.modelled, 3)} with the published link speeds",
        )


def of_steps(runs: Sequence[StepRun], on_tpu: bool) -> Iterator[Finding]:
    """Compares both classes on each step, and each step with its plan.

    ``on_tpu``: whether the steps ran on a TPU, for which plans are.
    """
    lanes: dict[str, dict[str, StepRun]] = {}
    for run in runs:
        lanes.setdefault(run.name, {})[run.lane] = run
    for name, by_lane in lanes.items():
        ours = by_lane.get("xla_fsdp")
        other = by_lane.get("in-tree")
        if ours is not None and other is not None:
            yield _compare_with_intree(name, ours, other)
        if ours is not None and ours.planned is not None and not on_tpu:
            found = f"{milliseconds(ours.seconds)} on CPU ranks, {milliseconds(ours.planned)} in"
            yield Finding(Status.SKIPPED, f"plan of {name}", f"{found} a plan for another device")
        elif ours is not None and ours.planned is not None:
            yield _compare_with_plan(name, ours)
        if on_tpu and ours and ours.hbm is not None and ours.planned_hbm is not None:
            yield _memory(name, ours.hbm, ours.planned_hbm)


def _compare_with_intree(name: str, ours: StepRun, other: StepRun) -> Finding:
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, other.losses, strict=True))
    found = (
        f"{milliseconds(ours.seconds)}, in-tree {milliseconds(other.seconds)} "
        f"({other.seconds / ours.seconds:.2f} x); losses differ by {apart:.1e}"
    )
    title, expected = f"step {name}", "not slower than in-tree; the same losses"
    if not apart <= _LOSSES:
        remedy = "one of the two computes wrong losses here; report it with this file"
        return Finding(Status.FAILED, title, found, expected, remedy)
    slower = ours.seconds > 1.05 * other.seconds
    return Finding(Status.DIFFERENT if slower else Status.OK, title, found, expected)


def _compare_with_plan(name: str, ours: StepRun) -> Finding:
    assert ours.planned is not None
    share = ours.seconds / ours.planned
    found = f"{milliseconds(ours.seconds)}, {share:.2f} x of the plan"
    if ours.host > 0.9 * ours.seconds:
        found += f"; tracing on the host takes {milliseconds(ours.host)}, which limits the step"
    is_close = _STEP[0] <= share <= _STEP[1]
    expected = f"{milliseconds(ours.planned)} by the plan"
    return Finding(Status.OK if is_close else Status.DIFFERENT, f"plan of {name}", found, expected)


def _memory(name: str, peak: int, planned: int) -> Finding:
    share = peak / planned
    return Finding(
        Status.OK if _MEMORY[0] <= share <= _MEMORY[1] else Status.DIFFERENT,
        f"HBM of {name}",
        f"peak of {peak / 2**20:,.0f} MiB since the process began, {share:.2f} x of the plan",
        f"{planned / 2**20:,.0f} MiB required by the plan",
    )


def calibrate(
    family: str, times: Sequence[CollectiveTime], rates: Sequence[Rate], slice: Slice | None
) -> Calibration:
    """The figures that fit best; ``None`` for those without a measurement."""
    launch, hop, bandwidth = (None, None, None) if slice is None else _fit_links(times, slice)
    devices = 1 if slice is None else slice.chip.devices
    best = {rate.name: rate.value for rate in rates}
    products = [rate.value for rate in rates if rate.unit == "FLOP"]

    def of_a_chip(value: float | None) -> float | None:
        return None if value is None else value * devices

    return Calibration(
        family=family,
        link_bandwidth=bandwidth,
        launch_latency=launch,
        hop_latency=hop,
        hbm_bandwidth=of_a_chip(best.get("HBM, read and written")),
        matrix_flops=of_a_chip(max(products, default=None)),
        to_device=best.get("host to device"),
        to_host=best.get("device to host"),
    )


def _fit_links(
    times: Sequence[CollectiveTime], slice: Slice
) -> tuple[float | None, float | None, float | None]:
    """Fits launch and hop latency in seconds, and bytes per second of a link in one direction.

    It uses only groups along one axis: over several axes the compiler chooses among algorithms, and
    groups inside of a chip use no link. It minimizes the squared relative errors, with no figure
    below zero.
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
    """The numbers of launches and hops in ``time``, and the bytes on the busiest link."""

    def seconds(launch: float = 0.0, hop: float = 0.0, bandwidth: float = math.inf) -> float:
        chip = replace(slice.chip, launch_latency=launch, hop_latency=hop, link_bandwidth=bandwidth)
        return modelled(time, replace(slice, chip=chip)) or 0.0

    if seconds():  # it does not use links
        return None
    terms = [seconds(launch=1.0), seconds(hop=1.0), seconds(bandwidth=1.0)]
    return terms if terms[2] else None


def _least_squares(matrix: numpy.ndarray) -> numpy.ndarray | None:
    """``x >= 0`` for which ``matrix @ x`` is closest to ones; tries all subsets of zeros."""
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
