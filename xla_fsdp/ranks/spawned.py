"""Ranks in processes of their own, as on TPU: the first that fails ends all of this host.

``torch_xla.launch`` waits for its processes one after the other, and only then hands on what one of
them has raised. The others wait as well, in a collective, for the one that has raised. So a rank
that raises leaves a report and ends its process at once, and the process that launched them ends
the others. Their pool would do so by itself, but does not always know of the last one it started.

SIGTERM, which a scheduler sends to the launcher only or to all of them, goes on to every rank.
Those that have a :class:`xla_fsdp.Preemption` save and end with :class:`Preempted`, and so does the
launcher then.
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch_xla

from .channel import served
from .errors import Preempted, RankError, RankTimeoutError, portable

_REPORT = "report"
_PREEMPTED = "preempted"
# Where a process that is a rank finds the folder of its launch.
_FOLDER = "XLA_FSDP_RUN_FOLDER"
_SECONDS_BETWEEN_LOOKS = 0.5


def run(fn: Callable, args: Sequence[Any]) -> None:
    """``torch_xla.launch(fn, args)``, which ends as soon as a rank of this host fails.

    Raises:
        RankError: a rank raised; ``__cause__`` is its exception, if that can be pickled. Or a
            process ended by itself, which says no more.
        RankTimeoutError: ranks did not go on, and were to be ended then.
        Preempted: the ranks of this host ended with it.
    """
    # What is left there must not hide what went wrong.
    with tempfile.TemporaryDirectory(prefix="xla_fsdp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            with served(), _ending_all(folder):
                torch_xla.launch(_Reporting(folder, fn), tuple(args))
        except BrokenProcessPool as error:
            if (folder / _PREEMPTED).exists():
                raise Preempted((folder / _PREEMPTED).read_text()) from None
            failure, cause = _read(folder)
            raise failure from (cause or error)
        if (folder / _PREEMPTED).exists():
            raise Preempted((folder / _PREEMPTED).read_text())


def leave(reason: str) -> NoReturn:
    """Ends this process as :class:`Preempted` would, at once: its ranks may hang."""
    with contextlib.suppress(KeyError, OSError):  # nobody launched it; a full disk
        Path(os.environ[_FOLDER], _PREEMPTED).write_text(reason)
    os._exit(Preempted.EXIT_CODE)


def fail(rank: int, error: BaseException) -> NoReturn:
    """Ends this process as if its rank had raised ``error``, at once: its ranks may hang."""
    folder = os.environ.get(_FOLDER)
    if folder is None:  # nobody launched it
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    _report_and_exit(Path(folder), rank, error)


def require_importable(fn: Callable) -> None:
    """Raises a RuntimeError if a new process could not find ``fn``, which travels by its name."""
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        name = getattr(fn, "__qualname__", repr(fn))
        raise RuntimeError(
            f"{name} is defined in a notebook or in an interactive session, where the processes "
            "of the ranks cannot find it; write it and what it needs into a file (in a notebook: "
            "begin the cell with %%writefile training.py) and import it from there"
        )


class _Reporting:
    """``fn``, which ends its process if it raises, and says why in ``folder``.

    While it runs there is a file ``<process id>.<rank>``.
    """

    def __init__(self, folder: Path, fn: Callable) -> None:
        self.folder, self.fn = folder, fn

    def __call__(self, rank: int, *args: Any) -> None:
        running = self.folder / f"{os.getpid()}.{rank}"
        os.environ[_FOLDER] = str(self.folder)
        try:
            running.touch()
            self.fn(rank, *args)
        except Preempted as end:  # of all ranks, each of which has saved
            (self.folder / _PREEMPTED).write_text(end.reason)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                _report_and_exit(self.folder, rank, error)
        running.unlink(missing_ok=True)


@contextlib.contextmanager
def _ending_all(folder: Path) -> Iterator[None]:
    """Within, a process that ends while it has a rank takes the others with it, and so does Ctrl-C,
    which torch_xla would answer by waiting for them. SIGTERM is for the ranks; this process gets it
    once more when they have ended, unless they were preempted in good order."""
    over = threading.Event()
    told = threading.Event()

    def watch() -> None:
        while not over.wait(_SECONDS_BETWEEN_LOOKS):
            if _lost(folder):
                _kill(folder)

    def interrupted(number: int, frame: FrameType | None) -> None:
        _kill(folder)
        assert callable(before)  # or this is not asked
        before(number, frame)

    def terminated(number: int, frame: FrameType | None) -> None:
        told.set()
        for child in multiprocessing.active_children():  # those that only start, too
            child.terminate()

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    handled = callable(before) and in_main_thread
    if handled:
        signal.signal(signal.SIGINT, interrupted)
    before_term = signal.getsignal(signal.SIGTERM)
    passed_on = in_main_thread and before_term not in (signal.SIG_IGN, None)
    if passed_on:
        signal.signal(signal.SIGTERM, terminated)
    watcher = threading.Thread(target=watch, name="xla_fsdp-ranks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        if handled:
            signal.signal(signal.SIGINT, before)
        if passed_on:
            signal.signal(signal.SIGTERM, before_term)
            if told.is_set() and not (folder / _PREEMPTED).exists():
                shutil.rmtree(folder, ignore_errors=True)  # nothing else would, after a plain end
                signal.raise_signal(signal.SIGTERM)


def _running(folder: Path) -> set[int]:
    """Processes that have a rank, or had one when they ended."""
    try:
        return {int(name.partition(".")[0]) for name in os.listdir(folder) if "." in name}
    except OSError:  # somebody cleans up temporary files
        return set()


def _lost(folder: Path) -> bool:
    # The files first: a process that ends well removes its own before.
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
            _write(folder, rank, error)
        except Exception:  # a full disk, most likely, and perhaps of that the rank died
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Nothing may wait here: the process may have another rank, in a collective.
        os._exit(1)


def _write(folder: Path, rank: int, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    said, cause = type(error).__name__, portable(error)
    with contextlib.suppress(Exception):  # whatever the user's class does there
        said += f": {error}"
    draft = folder / f"report-{os.getpid()}-{threading.get_ident()}"
    draft.write_bytes(pickle.dumps((f"rank {rank} raised {said}", rank, text, cause)))
    try:
        os.link(draft, folder / _REPORT)
    except FileExistsError:
        pass  # another rank was first
    except OSError:  # no links there
        os.replace(draft, folder / _REPORT)


def _read(folder: Path) -> tuple[RankError, BaseException | None]:
    try:
        message, rank, text, data = pickle.loads((folder / _REPORT).read_bytes())
    except FileNotFoundError:
        return RankError(
            "a process of a rank ended without a report: look above for what it or the runtime "
            "printed, and in the system's log for whether it was killed for its memory"
        ), None
    cause = None
    with contextlib.suppress(Exception):  # a class that only the rank's process knows
        cause = data and pickle.loads(data)
    if isinstance(cause, RankTimeoutError):  # of all ranks: no single one has raised it
        return cause, None
    return RankError(message, rank, text), cause
