"""The child processes of a verification: ``python -m xla_fsdp.pods.stages WHAT JOB``.

``again`` launches ranks a second time and lets one fail; ``plan`` needs no ranks.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from ..checkpoint.rank_exchange import RankExchange
from ..collectives.routes import routes_for
from ..collectives.world import World
from ..compiled.cache import compilation_counts, enable_compilation_cache
from ..ranks.launch import RankError, launch
from ..ranks.spawned import end_with_parent
from ..tpu.chips import Chip, chip_of
from ..tpu.topology import Slice
from ..wording import first_line, to_one_line
from . import steps
from .findings import skipped
from .measurements import CollectiveTime, Job, StepRun
from .microbenchmarks import Stopwatch, measure_collectives, measure_device
from .parity import SIZE, compare, save_and_load

_DYING = "the last rank ends here, on purpose"


def main(what: str, path: str) -> None:
    end_with_parent(lambda: os.killpg(0, signal.SIGKILL))  # also its ranks
    job: Job = pickle.loads(Path(path).read_bytes())
    if what == "plan":
        plan_steps(job)
        return
    try:
        enable_compilation_cache(Path(job.folder) / "programs")
    except (NotImplementedError, OSError) as error:
        job.add("uncached", str(error))
    launch(run_stages, (job,), job.num_devices)
    if what == "again":
        _end_one_rank(job)


def _end_one_rank(job: Job) -> None:
    for way in ["raises"] if xr.device_type() == "CPU" else ["raises", "dies"]:
        began, message, named = time.monotonic(), "", None
        try:
            launch(partial(_end, way=way), (), job.num_devices)
        except RankError as error:
            message, named = first_line(error), error.rank
        seconds = time.monotonic() - began
        job.add("death", {"way": way, "error": message, "rank": named, "seconds": seconds})


def _end(rank: int, way: str) -> None:
    """Ends the last rank, while all others wait for it in a collective."""
    if xr.global_ordinal() == xr.world_size() - 1:
        if way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(_DYING)
    value = xm.all_reduce(xm.REDUCE_SUM, torch.ones(1).to(torch_xla.device()))
    torch_xla.sync()
    value.item()  # type: ignore[union-attr]


def plan_steps(job: Job) -> None:
    from ..planning.api import plan  # needs an extra

    for name in job.sizes:
        size = steps.ON_TPU.get(name) or steps.ON_CPU[name]
        try:
            report = plan(steps.planned(size), job.topology, progress=False, ranks=(0,))
        except Exception as error:
            found = f"{type(error).__name__}: {to_one_line(error, 500)}"
            job.add("finding", skipped(f"plan of {name}", found))
            continue
        job.add("plan", (name, report.timing.step, report.memory.required))


def run_stages(rank: int, job: Job) -> None:
    """Rank 0 writes the results."""
    first = xr.global_ordinal() == 0
    chip, slice = _own_chip(), _slice()
    family, topology = chip.family if chip else "cpu", slice.name if slice else ""
    if first:
        job.add("where", (_device_kind(), family, xr.world_size(), topology))
    for stage in job.stages:
        kind, measure = STAGES[stage]
        for value in measure(job):
            if first:
                job.add(kind, value)
        if xr.local_ordinal() == 0:  # each host must know where to continue
            job.add("done", stage)


def _device_kind() -> str:
    return xm.xla_device_kind()


def _own_chip() -> Chip | None:
    return chip_of(_device_kind())


def _slice() -> Slice | None:
    routes = routes_for(_device_kind(), xr.global_runtime_device_attributes())
    known = routes is not None and routes.slice.devices == xr.world_size()
    return routes.slice if routes is not None and known else None


def _programs(job: Job) -> Iterator[dict[str, Any]]:
    """Runs a few steps, whose programs a second start must find."""
    lane, losses = steps.Lane(steps.OURS, SIZE), []
    for _ in range(3):
        loss = lane.trace()
        torch_xla.sync()
        losses.append(float(loss.item()).hex())
    RankExchange().gather_values("train", None)  # the counts include all ranks
    yield {"losses": losses, **compilation_counts()._asdict()}
    RankExchange().gather_values("count", None)


def _collective_times(job: Job) -> Iterator[CollectiveTime]:
    watch, world, on_tpu = Stopwatch(torch_xla.device()), World.current(), _own_chip() is not None
    return measure_collectives(watch, world, on_tpu, _slice(), _time_check(job))


def _time_check(job: Job) -> Callable[[], bool]:
    """Rank 0 decides for all ranks."""
    exchange = RankExchange()
    return lambda: bool(
        exchange.run_on_first_rank("continue measuring", lambda: time.time() < job.until)
    )


def _steps(job: Job) -> Iterator[StepRun]:
    known = steps.ON_CPU if _own_chip() is None else steps.ON_TPU
    sizes = {name: size for name, size in known.items() if not job.sizes or name in job.sizes}
    if not sizes and xr.global_ordinal() == 0:
        found = f"{', '.join(job.sizes)} runs on another kind of device; here: {', '.join(known)}"
        job.add("finding", skipped("steps", found))
    peaks = {} if _own_chip() is None else steps.peaks(sizes)
    has_time = _time_check(job)
    for name, size in sizes.items():
        if not has_time():
            return
        yield from steps.time_both_classes(name, size, peaks.get(name))


# In the order in which they run, with the kind of their notes.
STAGES: dict[str, tuple[str, Callable[[Job], Iterable[Any]]]] = {
    "programs": ("programs", _programs),
    "parity": ("finding", lambda job: compare(job.cases)),
    "checkpoints": ("finding", lambda job: [save_and_load(job.ckpt_dir)]),
    "rates": ("rate", lambda job: measure_device(Stopwatch(torch_xla.device()), _own_chip())),
    "collectives": ("collective", _collective_times),
    "steps": ("step", _steps),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
