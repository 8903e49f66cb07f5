"""Measure times: all lanes are in one launch and take turns in each round."""

from __future__ import annotations

import statistics
import threading
import time

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

from .lanes import Lane, Workload

WARM_UP_LIMIT = 8  # steps; compiles stop after two or three


def measure(rank: int, work: Workload, names: list[str], rounds: int, steps: int, turns) -> dict:
    """Measure on one rank of the launch; return the input of :func:`summary`, by lane."""
    lanes = [Lane(name, work, rank) for name in names]
    found = {lane.name: _warm_up(lane, turns) for lane in lanes}
    compiled = _compiles()[0]
    for number in range(rounds):
        # Alternate the order: caches and clock rate of the first lane affect the second.
        for lane in lanes if number % 2 == 0 else reversed(lanes):
            one = found[lane.name]
            one["step_s"].append(_steps(lane, steps, turns if work.checkpoint else None))
            one["turn_s"].append(_turn(lane, turns))
    if _compiles()[0] != compiled:
        raise RuntimeError("a step was compiled while it was timed")
    xm.rendezvous("timed")
    for lane in lanes:
        found[lane.name]["losses"].append(lane.trace().item())
    return found


def summary(by_rank: list[dict], name: str) -> dict:
    """Step time of the launch, and host time averaged over ranks: medians over rounds."""
    rounds = zip(*(rank[name]["turn_s"] for rank in by_rank), strict=True)
    return {
        "step_ms": 1e3 * statistics.median(by_rank[0][name]["step_s"]),
        "step_ms_rounds": [1e3 * value for value in by_rank[0][name]["step_s"]],
        "launch_trace_ms": 1e3 * statistics.median(statistics.mean(one) for one in rounds),
        "compile_s": by_rank[0][name]["compile_s"],
        "losses": [
            statistics.mean(step)
            for step in zip(*(rank[name]["losses"] for rank in by_rank), strict=True)
        ],
    }


def _warm_up(lane: Lane, turns: threading.Lock) -> dict:
    """Run steps until nothing compiles."""
    losses, compiles, seconds = [], None, 0.0
    count, total = _compiles()
    while compiles != count and len(losses) < WARM_UP_LIMIT:
        compiles = count
        with turns:
            loss = lane.trace()
        torch_xla.sync()
        losses.append(loss.item())
        xm.rendezvous("warm")  # all ranks read the same count
        count, now = _compiles()
        xm.rendezvous("read")
        seconds += now - total
        total = now
    return {"losses": losses, "compile_s": seconds, "step_s": [], "turn_s": []}


def _compiles() -> tuple[int, float]:
    data = met.metric_data("CompileTime")
    return (data[0], data[1] / 1e9) if data else (0, 0.0)


def _steps(lane: Lane, steps: int, turns: threading.Lock | None) -> float:
    """Mean seconds of a step, until the devices of all ranks have finished."""
    _all_done()
    start = time.perf_counter()
    for _ in range(steps):
        # The loss is kept over the sync: with one output less it would be another program.
        if turns is None:
            loss = lane.trace()
        else:
            # The in-tree checkpoint has its state in a global variable, so only one rank at a time
            # may trace. For a fair comparison this holds for both lanes.
            with turns:
                loss = lane.trace()
        torch_xla.sync()
    _all_done()
    del loss
    return (time.perf_counter() - start) / steps


def _turn(lane: Lane, turns: threading.Lock) -> float:
    """CPU seconds of tracing a step on this rank, while all other ranks wait.

    It is the time of the process, since the backward is traced on autograd's threads. The barriers
    before and after ensure that no other thread of the process works at the same time.
    """
    _all_done()
    with turns:
        start = time.process_time()
        loss = lane.trace()
        used = time.process_time() - start
    xm.rendezvous("traced")
    torch_xla.sync()
    _all_done()
    del loss
    return used


def _all_done() -> None:
    xm.wait_device_ops()
    xm.rendezvous("done")
