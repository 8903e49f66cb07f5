"""``xla_fsdp.verify``: measures what a machine does, and holds it against what is promised."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..tpu.topology import Slice, resolve
from .parity import CASES
from .privacy import scrubbed
from .records import Finding, Status, Where
from .report import Verification
from .stages import NOTES, STAGES, Job
from .steps import ON_CPU, ON_TPU
from .verdict import describe_machine, judge

_SHORTEST = 30.0  # seconds that make sense as a limit


def verify(
    *,
    num_devices: int | None = None,
    ckpt_dir: str | os.PathLike[str] | None = None,
    seconds: float = 600.0,
    stages: Sequence[str] = STAGES,
    cases: Sequence[str] = (),
    sizes: Sequence[str] = (),
    topology: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Verification:
    """Runs what is promised on the devices that are here, and measures them.

    On a TPU slice or on CPU ranks: sharded training against unsharded training, a checkpoint saved
    by all ranks and loaded into shards of half of them, programs found by a second start, a rank
    that dies; the device's memory, matrix unit and link to the host; each collective by size and
    axis; three small steps beside torch_xla's own class and beside their plans.

    Everything runs in processes of its own: call it from a main program that has touched no XLA
    device. On several hosts call it on all of them, as the training would be; the one with rank 0
    gets the report.

    Args:
        num_devices: ranks, as for :func:`xla_fsdp.launch`.
        ckpt_dir: for the checkpoint, a folder that all hosts share; default: a temporary one.
        seconds: in all. What is not done by then is skipped, or ended.
        stages: of ``programs``, ``parity``, ``checkpoints``, ``rates``, ``collectives``, ``steps``.
        cases: names of ways to shard (``parity``); default: all.
        sizes: names of steps (``steps``); default: all of this kind of device.
        topology: the slice to plan the steps for; default: this one. Nothing is planned on CPU
            ranks unless it is given, since a plan is of a TPU.
        say: told what is going on; default: nobody.

    Returns:
        The report: ``print`` it, ``.save("x.json")``, ``.plot("x.html")``, ``.calibration``, and
        ``.ok``: whether nothing failed.

    Raises:
        ValueError: an unknown stage, case, size or slice; ``seconds`` below 30.
        RuntimeError: this process has started XLA's runtime already.
    """
    slice = None if topology is None else resolve(topology)
    _check(stages, cases, sizes, seconds)
    until = time.time() + seconds
    with tempfile.TemporaryDirectory(prefix="xla_fsdp-verify-") as name:
        folder = Path(name)
        job = Job(
            stages=tuple(stages),
            folder=name,
            ckpt_dir=os.fspath(ckpt_dir) if ckpt_dir is not None else str(folder / "checkpoints"),
            until=until - 0.25 * seconds,  # what comes after the measuring takes time as well
            cases=tuple(cases),
            sizes=tuple(sizes),
            num_devices=num_devices,
        )
        run = _Children(folder, until, say or (lambda text: None))
        run.stages(job)
        if "programs" in stages:
            run.again(replace(job, stages=("programs",)))
        where = describe_machine(run.notes("where"))
        if not run.notes("where") and not run.failures:
            found = "rank 0 runs on another host, which has the report"
            run.failures.append(Finding(Status.SKIPPED, "report", found))
        if "steps" in stages:
            run.plan(job, where, slice)
        return judge(run.notes, run.failures, where, slice, stages)


def _check(
    stages: Sequence[str], cases: Sequence[str], sizes: Sequence[str], seconds: float
) -> None:
    from .. import xlac  # not at the top of the file: it imports torch_xla

    for what, given, known in (
        ("stages", stages, STAGES),
        ("cases", cases, [case.name for case in CASES]),
        ("sizes", sizes, [*ON_TPU, *ON_CPU]),
    ):
        wrong = [name for name in given if name not in known]
        if wrong or isinstance(given, str):
            raise ValueError(f"{what}: {wrong or given!r}, known are {', '.join(known)}")
    if not seconds >= _SHORTEST:
        raise ValueError(f"seconds is {seconds}, at least {_SHORTEST:.0f} are needed")
    if xlac.runtime_has_started():
        raise RuntimeError(
            "verify starts ranks in processes of its own, and this one has started XLA's runtime, "
            "which holds the devices: call it from a main program that has touched none"
        )


class _Children:
    """Processes, one after the other, and what they left in the folder."""

    def __init__(self, folder: Path, until: float, say: Callable[[str], None]) -> None:
        self.folder, self.until, self.say = folder, until, say
        self.failures: list[Finding] = []

    def stages(self, job: Job) -> None:
        """All stages; after one that fails the others in a new process."""
        left = list(job.stages)
        while left:
            before = len(self.notes("done"))
            problem = self._run("ranks", replace(job, stages=tuple(left)), f"{', '.join(left)}")
            done = len(self.notes("done")) - before
            if not problem:
                return
            remedy = "the message is of the rank that failed; report it with this file"
            stage = [*left, "the end"][done]
            self.failures.append(Finding(Status.FAILED, stage, problem, "it ends well", remedy))
            left = left[done + 1 :]
            if time.time() > self.until:
                return

    def again(self, job: Job) -> None:
        problem = self._run("again", job, "a second start, and a rank that dies")
        if problem:
            self.failures.append(Finding(Status.FAILED, "second start", problem, "it ends well"))

    def plan(self, job: Job, where: Where, slice: Slice | None) -> None:
        if slice is None and where.topology:
            slice = resolve(where.topology)
        if slice is None:
            found = "not asked for on CPU ranks: a plan is of a TPU (topology names one)"
            self.failures.append(Finding(Status.SKIPPED, "plans of the steps", found))
            return
        wanted = job.sizes or tuple(ON_CPU if where.family == "cpu" else ON_TPU)
        # Tracing needs no device, and must not take those that ranks use.
        problem = self._run(
            "plan", replace(job, sizes=wanted, topology=slice.name), "plans", {"PJRT_DEVICE": "CPU"}
        )
        if problem:
            self.failures.append(Finding(Status.SKIPPED, "plans of the steps", problem))

    def notes(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / NOTES
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # of a process that was killed
                note = json.loads(line)
                if note.get("note") == kind:
                    found.append(note)
        return found

    def _run(
        self, what: str, job: Job, shown: str, more: Mapping[str, str] | None = None
    ) -> str | None:
        """Runs a child; what went wrong, or ``None``."""
        self.say(shown)
        path, log = self.folder / f"{what}.job", self.folder / f"{what}.log"
        job.write(path)
        command = [sys.executable, "-m", "xla_fsdp.verifying.child", what, str(path)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **(more or {})},
                start_new_session=True,  # so that its ranks end with it
            )  # fmt: skip
            try:
                code = child.wait(max(1.0, self.until - time.time()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if code == 0:
            return None
        end = "was still running when the time was over" if code is None else f"ended with {code}"
        said = _reason(log.read_text(errors="replace").splitlines())
        return scrubbed(f"{end}: {said or 'it said nothing'}")[:900]


def _reason(lines: Sequence[str]) -> str:
    """The last line of an output that names an error, or the last one of all."""
    spoken = [line.strip() for line in lines if line.strip()]
    errors = [line for line in spoken if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or spoken or [""])[-1]
