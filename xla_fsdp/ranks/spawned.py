"""Runs ranks in separate processes, as on TPU; the first that fails ends all of this host.

A rank that raises writes a report and ends its process, and the launcher ends the others.
``torch_xla.launch`` would wait for them first, while they wait in a collective.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch_xla

from .channel import served
from .errors import Preempted, RankError, RankTimeoutError, described, loads_or_none, portable

_REPORT = "report"
_PREEMPTED = "preempted"
# The folder of the launch.
_FOLDER = "XLA_FSDP_RUN_FOLDER"
_POLL_SECONDS = 0.5


def run_spawned(fn: Callable, args: Sequence[Any]) -> None:
    """``torch_xla.launch``, which ends as soon as a rank of this host fails.

    Raises:
        RankError: a rank raised, or a process ended without a report.
        RankTimeoutError: ranks made no progress, and the watchdog was set to end them.
        Preempted: the ranks of this host ended with it.
    """
    # The cleanup must not hide the first error.
    with tempfile.TemporaryDirectory(prefix="xla_fsdp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        preempted = folder / _PREEMPTED
        try:
            with served(), _ending_all(folder):
                torch_xla.launch(partial(_run_and_report, folder, fn), tuple(args))
        except BrokenProcessPool as error:
            if not preempted.exists():
                failure, cause = _read_report(folder)
                raise failure from (cause or error)
        if preempted.exists():
            raise Preempted(preempted.read_text())


def leave(reason: str) -> NoReturn:
    """Ends this process as :class:`Preempted` would, without waiting for ranks."""
    with contextlib.suppress(KeyError, OSError):  # not launched, or a full disk
        Path(os.environ[_FOLDER], _PREEMPTED).write_text(reason)
    os._exit(Preempted.EXIT_CODE)


def fail(rank: int, error: BaseException) -> NoReturn:
    """Ends this process as if its rank had raised ``error``, without waiting for ranks."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        print(described(error), file=sys.stderr, flush=True)
        os._exit(1)
    _report_and_exit(Path(folder), rank, error)


def end_with_parent(end: Callable[[], object]) -> None:
    """Calls ``end()`` on a thread when the process that has started this one has ended."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        end()

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


def require_importable(fn: Callable) -> None:
    """Raises RuntimeError if a new process could not import ``fn``."""
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        name = getattr(fn, "__qualname__", repr(fn))
        raise RuntimeError(
            f"{name} is defined in a notebook or in an interactive session, where the processes "
            "of the ranks cannot find it. Move it and all that it uses into a file (in a notebook: "
            "begin the cell with %%writefile training.py) and import it from there"
        )


def _run_and_report(folder: Path, fn: Callable, rank: int, *args: Any) -> None:
    """While ``fn`` runs, there is a file ``<process id>.<rank>`` in ``folder``."""
    running = folder / f"{os.getpid()}.{rank}"
    os.environ[_FOLDER] = str(folder)
    try:
        running.touch()
        fn(rank, *args)
    except Preempted as end:  # all ranks raise it
        (folder / _PREEMPTED).write_text(end.reason)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _report_and_exit(folder, rank, error)
    running.unlink(missing_ok=True)


@contextlib.contextmanager
def _ending_all(folder: Path) -> Iterator[None]:
    """Ends all ranks of this host on Ctrl-C, or if the process of one ends early.

    SIGTERM goes to the ranks first, and then to this process unless they saved (Preempted).
    """
    over = threading.Event()
    terminating = threading.Event()

    def watch() -> None:
        while not over.wait(_POLL_SECONDS):
            if _lost(folder):
                _kill(folder)

    def interrupted(number: int, frame: FrameType | None) -> None:
        _kill(folder)
        before[number](number, frame)

    def terminated(number: int, frame: FrameType | None) -> None:
        terminating.set()
        for child in multiprocessing.active_children():  # also those still starting
            child.terminate()

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        if callable(signal.getsignal(signal.SIGINT)):
            before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupted)
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, None):
            before[signal.SIGTERM] = signal.signal(signal.SIGTERM, terminated)
    watcher = threading.Thread(target=watch, name="xla_fsdp-ranks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for number, handler in before.items():
            signal.signal(number, handler)
        if terminating.is_set() and not (folder / _PREEMPTED).exists():
            shutil.rmtree(folder, ignore_errors=True)  # the signal may end the process
            signal.raise_signal(signal.SIGTERM)


def _running(folder: Path) -> set[int]:
    """The processes that have a rank, or had one when they ended."""
    return {int(name.partition(".")[0]) for name in os.listdir(folder) if "." in name}


def _lost(folder: Path) -> bool:
    # Files first: a process removes its file before it ends normally.
    running = _running(folder)
    return not running <= {child.pid for child in multiprocessing.active_children()}


def _kill(folder: Path) -> None:
    running = _running(folder)
    for child in multiprocessing.active_children():
        if child.pid in running:
            child.kill()


def _report_and_exit(folder: Path, rank: int, error: BaseException) -> NoReturn:
    try:
        try:
            _write_report(folder, rank, error)
        except Exception:  # most likely a full disk
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Another rank of this process may be in a collective.
        os._exit(1)


def _write_report(folder: Path, rank: int, error: BaseException) -> None:
    failure = RankError(
        f"rank {rank} raised {described(error)}", rank, "".join(traceback.format_exception(error))
    )
    draft = folder / f"report-{os.getpid()}-{threading.get_ident()}"
    draft.write_bytes(pickle.dumps((failure, portable(error))))
    try:
        os.link(draft, folder / _REPORT)
    except FileExistsError:
        pass
    except OSError:  # the file system has no links
        os.replace(draft, folder / _REPORT)


def _read_report(folder: Path) -> tuple[RankError, BaseException | None]:
    try:
        failure, data = pickle.loads((folder / _REPORT).read_bytes())
    except FileNotFoundError:
        return RankError(
            "a process of a rank ended without a report: look above for the output of the process "
            "and the runtime, and in the system's log for whether the process ran out of memory"
        ), None
    cause = loads_or_none(data)
    if isinstance(cause, RankTimeoutError):
        return cause, None
    return failure, cause
