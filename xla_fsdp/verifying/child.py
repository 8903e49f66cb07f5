"""The child processes of a verification: ``python -m xla_fsdp.verifying.child WHAT JOB``.

``ranks`` launches ranks that run the stages. ``again`` launches ranks a second time, to check that
they find the compiled programs, and then lets one fail. ``plan`` plans the steps, without ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from ..wording import first_line, to_one_line
from .stages import Job, Notes, run

_DYING = "the last rank ends here, on purpose"


def main(what: str, path: str) -> None:
    watch = threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True)
    watch.start()
    job = Job.read(Path(path))
    if what == "plan":
        _plan(job)
        return
    from ..compiled.cache import enable_compilation_cache
    from ..ranks.launch import launch

    try:
        enable_compilation_cache(Path(job.folder) / "programs")
    except (NotImplementedError, OSError) as error:
        Notes(Path(job.folder), True).add("uncached", error=str(error))
    launch(run, (path,), job.num_devices)
    if what == "again":
        _end_one_rank(job)


def _end_with(parent: int) -> None:
    """Ends this process and its ranks when the process that started it has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _end_one_rank(job: Job) -> None:
    from ..ranks.launch import RankError, launch

    notes = Notes(Path(job.folder), True)
    ways = ["raises"] if os.environ.get("PJRT_DEVICE", "").startswith("CPU") else ["raises", "dies"]
    for way in ways:
        began, message, named = time.monotonic(), "", None
        try:
            launch(partial(_end, way=way), (), job.num_devices)
        except RankError as error:
            message, named = first_line(error), error.rank
        seconds = time.monotonic() - began
        notes.add("death", way=way, error=message, rank=named, seconds=seconds)


def _end(rank: int, way: str) -> None:
    """Ends the last rank, while all others wait for it in a collective."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    if xr.global_ordinal() == xr.world_size() - 1:
        if way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(_DYING)
    value = xm.all_reduce(xm.REDUCE_SUM, torch.ones(1).to(torch_xla.device()))
    torch_xla.sync()
    value.item()  # type: ignore[union-attr]


def _plan(job: Job) -> None:
    from ..planning.api import plan
    from . import steps

    out = Notes(Path(job.folder), True)
    for name in job.sizes:
        size = steps.ON_TPU.get(name) or steps.ON_CPU[name]
        try:
            report = plan(steps.planned(size), job.topology, progress=False, ranks=(0,))
        except Exception as error:  # the compiler fails, the slice is wrong, an extra is missing
            out.add(
                "unplanned", name=name, error=f"{type(error).__name__}: {to_one_line(error, 500)}"
            )
            continue
        saved = Path(job.folder) / f"plan-{len(list(Path(job.folder).glob('plan-*')))}.json"
        report.save(saved)
        out.add("plan", name=name, path=str(saved))


if __name__ == "__main__":
    main(*sys.argv[1:])
