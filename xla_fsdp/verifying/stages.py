"""The stages that the ranks of a child process run, and the notes that rank 0 writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from ..checkpoint.rank_exchange import RankExchange
from ..collectives.routes import routes_for
from ..collectives.world import World
from ..compiled.cache import compilation_counts
from ..tpu.chips import Chip, chip_of
from ..tpu.topology import Slice
from ..wrapper import XlaFullyShardedDataParallel as FSDP
from . import steps
from .microbenchmarks import (
    AMOUNTS_ON_CPU,
    AMOUNTS_ON_TPU,
    SIZES_ON_CPU,
    SIZES_ON_TPU,
    Stopwatch,
    measure_collectives,
    measure_device,
)
from .nets import SEED, Net, tokens
from .parity import CASES, SIZE, compare, save_and_load

# In the order in which they run. After a failure, the rest runs in a new process.
STAGES = ("programs", "parity", "checkpoints", "rates", "collectives", "steps")

NOTES = "notes.jsonl"


@dataclass(frozen=True)
class Job:
    """The job of a child process.

    ``cases``, ``sizes``: the names of those to run, all if empty; ``until``: when measurements end,
    as ``time.time()``.
    """

    stages: tuple[str, ...]
    folder: str
    ckpt_dir: str
    until: float
    cases: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    num_devices: int | None = None
    topology: str = ""

    @classmethod
    def read(cls, path: Path) -> Job:
        data: dict[str, Any] = json.loads(path.read_text())
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})  # type: ignore

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def run(rank: int, text: str) -> None:
    """Runs all stages of the job in ``text`` on this rank."""
    job = Job.read(Path(text))
    out = Notes(Path(job.folder), xr.global_ordinal() == 0)
    out.add("where", **_where())
    for stage in job.stages:
        _STAGES[stage](job, out)
        if xr.local_ordinal() == 0:  # each host must know at which stage to continue
            Notes(Path(job.folder), True).add("done", stage=stage)


class Notes:
    """The results, one JSON object in each line, which rank 0 writes immediately to a file."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self._path = folder / NOTES if writes else None

    def add(self, note: str, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"note": note, **values}, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.value if hasattr(value, "value") else str(value)


def _kind() -> str:
    kind: str = xm.xla_device_kind()
    return kind


def _chip() -> Chip | None:
    """``None`` on CPU ranks."""
    return chip_of(_kind())


def _where() -> dict[str, Any]:
    chip, slice = _chip(), _slice()
    return {
        "device": _kind(),
        "family": "cpu" if chip is None else chip.family,
        "ranks": xr.world_size(),
        "topology": slice.name if slice else "",
    }


def _slice() -> Slice | None:
    routes = routes_for(_kind(), xr.global_runtime_device_attributes())
    known = routes is not None and routes.slice.devices == xr.world_size()
    return routes.slice if routes is not None and known else None


def _programs(job: Job, out: Notes) -> None:
    """Runs a few steps, whose programs a second start must find, and counts compilations."""
    torch.manual_seed(SEED)
    model = FSDP(Net(SIZE, FSDP))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    mine = tokens(SIZE, xr.world_size(), 0).chunk(xr.world_size())[xr.global_ordinal()]
    mine, losses = mine.to(torch_xla.device()), []
    for _ in range(3):
        loss = model(mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item().hex())
    RankExchange().gather_values("train", None)  # the counts include all ranks of the process
    out.add("programs", losses=losses, **compilation_counts()._asdict())
    RankExchange().gather_values("count", None)


def _parity(job: Job, out: Notes) -> None:
    for found in compare(case for case in CASES if not job.cases or case.name in job.cases):
        out.add("finding", **asdict(found))


def _checkpoints(job: Job, out: Notes) -> None:
    out.add("finding", **asdict(save_and_load(job.ckpt_dir)))


def _rates(job: Job, out: Notes) -> None:
    chip = _chip()
    amounts = AMOUNTS_ON_CPU if chip is None else AMOUNTS_ON_TPU
    watch = Stopwatch(torch_xla.device())
    for rate in measure_device(watch, amounts, chip):
        out.add("rate", **asdict(rate))


def _collectives(job: Job, out: Notes) -> None:
    sizes = SIZES_ON_CPU if _chip() is None else SIZES_ON_TPU
    watch, world = Stopwatch(torch_xla.device()), World.current()
    for time_ in measure_collectives(watch, world, _slice(), sizes, _time_check(job)):
        out.add("collective", **asdict(time_))


def _time_check(job: Job) -> Callable[[], bool]:
    """Returns a function that checks whether there is time left; rank 0 decides for all ranks."""
    exchange = RankExchange()
    return lambda: bool(
        exchange.run_on_first_rank("continue measuring", lambda: time.time() < job.until)
    )


def _steps(job: Job, out: Notes) -> None:
    known = steps.ON_CPU if _chip() is None else steps.ON_TPU
    sizes = {name: size for name, size in known.items() if not job.sizes or name in job.sizes}
    peaks = {} if _chip() is None else steps.peaks(sizes)
    for name, size in sizes.items():
        if not _time_check(job)():
            return
        for found in steps.run(name, size, peaks.get(name)):
            out.add("step", **asdict(found))


_STAGES: dict[str, Callable[[Job, Notes], None]] = {
    "programs": _programs,
    "parity": _parity,
    "checkpoints": _checkpoints,
    "rates": _rates,
    "collectives": _collectives,
    "steps": _steps,
}
