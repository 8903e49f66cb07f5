"""A pool of worker processes that run functions as ranks."""

from __future__ import annotations

import importlib.machinery
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any

from . import errors
from .errors import RankError, RankTimeoutError
from .fork_server import ForkServer

_MAX_IDLE = 2  # each uses some hundred MB
_START_SECONDS = 60.0
_MAX_RANKS = 8


class WorkerDiedError(RankError):
    """The worker process ended in the middle of a call; the message contains its output.

    Attributes:
        signal: the signal that killed it, or ``None``.
    """

    signal: signal.Signals | None = None


class WorkerPool:
    """Keeps at most one idle worker for each number of ranks, and at most two idle ones in total.

    Attributes:
        programs: a folder in which workers store compiled programs; ``None``: they store none.
    """

    def __init__(self) -> None:
        self.programs: str | None = None
        self._idle: list[_Worker] = []  # least recently used first
        self._server: ForkServer | None = None

    def run(self, fn: Callable, size: int, args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        """See :func:`xla_fsdp.testing.run_in_ranks`."""
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"num_ranks must be an int from 1 to {_MAX_RANKS}, got {size!r}")
        if not 1 <= size <= _MAX_RANKS:
            raise ValueError(f"num_ranks must be an int from 1 to {_MAX_RANKS}, got {size!r}")
        call = _dumps_call(fn, args, kwargs)
        worker = self._take(size)
        first_call = worker.fresh
        try:
            return worker.run(call, timeout)
        except WorkerDiedError as error:
            # XLA's runtime sometimes crashes in a process that has run many programs, some of which
            # failed. Earlier calls must not make this one fail, so it runs again in a new process.
            if first_call or error.signal not in (signal.SIGSEGV, signal.SIGABRT):
                raise
            sys.stderr.write(f"{error}\nRunning it again, in a new process.\n")
        finally:
            self._give_back(worker)
        worker = self._start(size)
        try:
            return worker.run(call, timeout)
        finally:
            self._give_back(worker)

    def close(self) -> None:
        """Ends all workers."""
        while self._idle:
            self._idle.pop().end()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _take(self, size: int) -> _Worker:
        for worker in self._idle:
            if worker.size == size:
                self._idle.remove(worker)
                if worker.alive():
                    return worker
                worker.end()
                break
        return self._start(size)

    def _start(self, size: int) -> _Worker:
        if self._server is None or not self._server.alive():
            self._server = ForkServer()
        return _Worker(self._server, size, self.programs)

    def _give_back(self, worker: _Worker) -> None:
        if worker.usable:
            self._idle.append(worker)
            while len(self._idle) > _MAX_IDLE:
                self._idle.pop(0).end()
        else:
            worker.end()


class _Worker:
    """One worker process.

    Attributes:
        size: its number of ranks.
        usable: whether another call may be sent to it.
    """

    def __init__(self, server: ForkServer, size: int, programs: str | None) -> None:
        self.size = size
        self.usable = True
        self.fresh = True
        self._output = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = server.start(size, programs, theirs.fileno(), self._output.fileno())
        self._connection = Connection(ours.detach())

    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, call: bytes, timeout: float) -> list[Any]:
        """Sends one call and waits for its results."""
        start = self._output.seek(0, os.SEEK_END)
        self.usable = False  # until the worker has answered
        limit = timeout + (_START_SECONDS if self.fresh else 0.0)
        try:
            self._connection.send((list(sys.path), os.getcwd(), call))
            if not self._connection.poll(limit):
                raise self._timed_out(limit, start)
            outcome, value, self.usable = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(start) from error
        self.fresh = False
        output = self._printed(start)
        if outcome == "results":
            sys.stderr.write(output)
            return [pickle.loads(result) for result in value]
        failure = _rank_error(*value) if outcome == "rank error" else _other_error(*value)
        if output and sys.version_info >= (3, 11):  # add_note needs Python 3.11
            failure.add_note(f"Printed by the ranks:\n{output}")
        raise failure

    def end(self) -> None:
        """Ends the process of this worker."""
        self._connection.close()  # an idle worker ends when its socket is closed
        try:
            self._process.wait(timeout=2.0 if self.usable else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _printed(self, start: int) -> str:
        self._output.seek(start)
        return self._output.read().decode(errors="replace")

    def _timed_out(self, limit: float, start: int) -> RankTimeoutError:
        before = self._output.seek(0, os.SEEK_END)
        printed = self._printed(start)
        self._process.send_signal(signal.SIGUSR1)  # the worker's faulthandler prints all stacks
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if self._output.seek(0, os.SEEK_END) > before:
                time.sleep(0.2)
                break
        stacks = self._printed(before)
        return RankTimeoutError(
            f"{self.size} ranks had not finished after {limit:g} s, so their process was killed. "
            f"Stacks of its threads:\n{stacks}\nPrinted before:\n{printed}"
        )

    def _died(self, start: int) -> WorkerDiedError:
        killer = None
        try:
            status = self._process.wait(timeout=5.0)
            killer = signal.Signals(-status) if status < 0 else None
            how = f"signal {killer.name}" if killer else f"status {status}"
        except subprocess.TimeoutExpired:
            how = "its connection closed"
        error = WorkerDiedError(
            f"the process of the {self.size} ranks ended ({how}). It printed:\n"
            f"{self._printed(start)}"
        )
        error.signal = killer
        return error


def _rank_error(
    name: str, message: str, rank: int | None, text: str, cause: bytes | None
) -> RankError:
    error = getattr(errors, name)(message, rank, text)
    if cause is not None:
        error.__cause__ = _loads_or_none(cause)
    return error


def _other_error(data: bytes | None, text: str) -> BaseException:
    error = None if data is None else _loads_or_none(data)
    return RuntimeError(text) if error is None else error


def _loads_or_none(data: bytes) -> BaseException | None:
    try:
        return pickle.loads(data)
    except Exception:  # its class may exist in the worker only; the message has the same text
        return None


def _dumps_call(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    import cloudpickle  # only test suites need it

    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    by_value = module is not None and not _importable(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    buffer = io.BytesIO()
    try:
        _pickler(buffer).dump((fn, args, kwargs))
        return buffer.getvalue()
    except Exception as error:
        raise TypeError(f"fn or its arguments cannot be sent to the ranks: {error}") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _pickler(buffer: io.BytesIO) -> pickle.Pickler:
    """A cloudpickle pickler that keeps the file names of functions, which messages contain.

    cloudpickle omits them since 3.1.3.
    """
    import cloudpickle

    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    def with_file(code: CodeType) -> tuple:
        make, parts = reduce(code)
        return make, tuple(code.co_filename if p == "<dynamic-code>" else p for p in parts)

    class Pickler(cloudpickle.Pickler):
        dispatch_table = ChainMap({CodeType: with_file}, cloudpickle.Pickler.dispatch_table)

    return Pickler(buffer)


def _importable(module: ModuleType) -> bool:
    """Whether the worker, which gets this process's ``sys.path``, would import the same file."""
    if module.__name__ == "__main__":
        return True  # cloudpickle sends its contents by value automatically
    path = None
    spec = None
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    assert spec is not None  # a name has one part at least
    return spec.origin is None or spec.origin == getattr(module, "__file__", None)
