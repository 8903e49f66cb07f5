"""From what was measured to what is as promised, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..planning.reporting.amounts import milliseconds
from .records import CollectiveTime, Finding, Rate, Status, StepRun

# Shares of a published or modelled figure between which it counts as held.
_FIGURE = (0.75, 1.1)
_STEP = (0.6, 1.6)
_MEMORY = (0.5, 1.1)
# Least loss difference of both classes that is a finding: bfloat16, summed in another order.
_LOSSES = 2e-2
# Seconds after which the other ranks should have ended.
_DEATH = 60.0


def programs(notes: Sequence[Mapping[str, Any]]) -> Finding:
    """What two starts said of the programs they compiled."""
    name = "compiled programs"
    if len(notes) < 2:
        return Finding(Status.SKIPPED, name, f"{len(notes)} of 2 starts came to train")
    first, second = notes[0], notes[1]
    found = (
        f"first start: {first['compiled']} compiled; second: {second['compiled']} compiled, "
        f"{second['cached']} found"
    )
    promised = "a second start compiles nothing, and trains the same bit for bit"
    if first["losses"] != second["losses"]:
        remedy = "do without enable_compilation_cache here; report it with this file"
        return Finding(Status.FAILED, name, f"{found}; other losses", promised, remedy)
    if second["compiled"]:
        return Finding(Status.DIFFERENT, name, found, promised)
    return Finding(Status.OK, name, found, promised)


def death(note: Mapping[str, Any], ranks: int) -> Finding:
    """What became of a launch of which the last rank ended."""
    name = f"a rank that {note['way']}"
    promised = f"the launch raises RankError within {_DEATH:.0f} s, on all hosts"
    found = f"{note['error'] or 'no error'} after {note['seconds']:.1f} s"
    right = note["error"] and (note["way"] != "raises" or note["rank"] == ranks - 1)
    if right and note["seconds"] < _DEATH:
        return Finding(Status.OK, name, found, promised)
    remedy = "watch jobs here from outside; report it with this file"
    return Finding(Status.FAILED, name, found, promised, remedy)


def of_rate(rate: Rate) -> Iterator[Finding]:
    if rate.published is None:
        return
    share = rate.value / rate.published
    held = _FIGURE[0] <= share <= _FIGURE[1]
    small = rate.unit == "FLOP" and rate.amount < 1e11  # too short to fill the unit
    yield Finding(
        Status.OK if held or small else Status.DIFFERENT,
        rate.name,
        f"{rate.value / 1e9:,.0f} G{rate.unit}/s, {share:.0%} of the published figure",
        f"{rate.published / 1e9:,.0f} G{rate.unit}/s at most",
    )


def of_collectives(times: Sequence[CollectiveTime]) -> Iterator[Finding]:
    """One finding for each kind and axis: the largest size beside the model."""
    groups: dict[tuple[str, str], list[CollectiveTime]] = {}
    for time in times:
        groups.setdefault((time.kind, time.axis), []).append(time)
    for (kind, axis), some in groups.items():
        largest = max(some, key=lambda time: time.bytes)
        if largest.modelled is None:
            continue
        share = largest.modelled / largest.seconds
        held = _FIGURE[0] <= share <= _FIGURE[1]
        yield Finding(
            Status.OK if held else Status.DIFFERENT,
            f"{kind}, {axis}",
            f"{largest.bytes / 1e6:.0f} MB in {milliseconds(largest.seconds, 3)}, "
            f"{share:.0%} of the modelled speed",
            f"{milliseconds(largest.modelled, 3)} by the published links",
        )


def of_steps(runs: Sequence[StepRun], on_tpu: bool) -> Iterator[Finding]:
    """Both classes on each step, and each step beside its plan; ``on_tpu``: of what plans are."""
    lanes: dict[str, dict[str, StepRun]] = {}
    for run in runs:
        lanes.setdefault(run.name, {})[run.lane] = run
    for name, by_lane in lanes.items():
        ours = by_lane.get("xla_fsdp")
        other = by_lane.get("in-tree")
        if ours is not None and other is not None:
            yield _beside(name, ours, other)
        if ours is not None and ours.planned is not None and not on_tpu:
            found = f"{milliseconds(ours.seconds)} on CPU ranks, {milliseconds(ours.planned)} by"
            yield Finding(Status.SKIPPED, f"plan of {name}", f"{found} a plan for another device")
        elif ours is not None and ours.planned is not None:
            yield _beside_plan(name, ours)
        if on_tpu and ours and ours.hbm is not None and ours.planned_hbm is not None:
            yield _memory(name, ours.hbm, ours.planned_hbm)


def _beside(name: str, ours: StepRun, other: StepRun) -> Finding:
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, other.losses, strict=True))
    found = (
        f"{milliseconds(ours.seconds)}, in-tree {milliseconds(other.seconds)} "
        f"({other.seconds / ours.seconds:.2f} x); losses apart {apart:.1e}"
    )
    title, promised = f"step {name}", "not slower than in-tree; the same losses"
    if not apart <= _LOSSES:
        remedy = "one of the two trains wrong here; report it with this file"
        return Finding(Status.FAILED, title, found, promised, remedy)
    slower = ours.seconds > 1.05 * other.seconds
    return Finding(Status.DIFFERENT if slower else Status.OK, title, found, promised)


def _beside_plan(name: str, ours: StepRun) -> Finding:
    assert ours.planned is not None
    share = ours.seconds / ours.planned
    found = f"{milliseconds(ours.seconds)}, {share:.2f} x of the plan"
    if ours.host > 0.9 * ours.seconds:
        found += f"; the host takes {milliseconds(ours.host)} to trace it, so it waits for that"
    held = _STEP[0] <= share <= _STEP[1]
    promised = f"{milliseconds(ours.planned)} by the plan"
    return Finding(Status.OK if held else Status.DIFFERENT, f"plan of {name}", found, promised)


def _memory(name: str, peak: int, planned: int) -> Finding:
    share = peak / planned
    return Finding(
        Status.OK if _MEMORY[0] <= share <= _MEMORY[1] else Status.DIFFERENT,
        f"HBM of {name}",
        f"{peak / 2**20:,.0f} MiB at most since the process began, {share:.2f} x of the plan",
        f"{planned / 2**20:,.0f} MiB required by the plan",
    )
