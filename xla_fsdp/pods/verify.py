"""``xla_fsdp.verify``: tests and measures a machine, and compares it with the expected results."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .. import xlac
from ..tpu.topology import Slice, resolve
from .commands import run_all
from .findings import Finding, failed, skipped
from .parity import CASES
from .privacy import scrubbed
from .records import Job, Machine, read_notes
from .report import Verification
from .stages import STAGES
from .steps import ON_CPU, ON_TPU
from .verdict import describe_machine, judge

_SHORTEST = 30.0  # seconds


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
        seconds: the total time limit, at least 30. Stages that are not finished then are skipped or
            ended.
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
    if not seconds >= _SHORTEST:
        raise ValueError(f"seconds must be at least {_SHORTEST:.0f}, got {seconds}")
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
        code = outcome.code
        end = "was still running at the time limit" if code is None else f"ended with {code}"
        return scrubbed(f"{end}: {outcome.reason}")
