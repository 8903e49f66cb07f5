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

from .errors import RankError, RankTimeoutError, loads_or_none

_MAX_IDLE = 2  # each uses some hundred MB
_START_SECONDS = 60.0
_MAX_RANKS = 8
# Garbage collection need not scan imported modules.
_SERVER = "import gc; gc.disable(); from xla_fsdp.ranks import worker; worker.main()"


class WorkerDiedError(RankError):
    """The worker process ended in the middle of a call."""

    signal: signal.Signals | None = None


class WorkerPool:
    """Keeps one idle worker for each number of ranks, and at most two in total.

    ``programs``: a folder for compiled programs; ``None``: workers store none.
    """

    def __init__(self) -> None:
        self.programs: str | None = None
        self._idle: dict[int, _Worker] = {}  # by number of ranks, least recently used first
        self._server: _ForkServer | None = None

    def run(self, fn: Callable, size: int, args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        """See :func:`xla_fsdp.testing.run_in_ranks`."""
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if not is_int or not 1 <= size <= _MAX_RANKS:
            raise (ValueError if is_int else TypeError)(
                f"num_ranks must be an int from 1 to {_MAX_RANKS}, got {size!r}"
            )
        call = _dumps_call(fn, args, kwargs)
        worker = self._take(size)
        while True:
            first_call = worker.fresh
            try:
                return worker.run(call, timeout)
            except WorkerDiedError as error:
                # XLA's runtime sometimes crashes in a process that has run many programs, some of
                # which failed. Earlier calls must not make this one fail.
                if first_call or error.signal not in (signal.SIGSEGV, signal.SIGABRT):
                    raise
                sys.stderr.write(f"{error}\nRunning it again, in a new process.\n")
            finally:
                self._give_back(worker)
            worker = self._start(size)

    def close(self) -> None:
        while self._idle:
            self._idle.popitem()[1].end()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _take(self, size: int) -> _Worker:
        worker = self._idle.pop(size, None)
        if worker is not None and worker.status() is not None:
            worker.end()
            worker = None
        return worker or self._start(size)

    def _start(self, size: int) -> _Worker:
        if self._server is None or not self._server.alive():
            self._server = _ForkServer()
        return _Worker(self._server, size, self.programs)

    def _give_back(self, worker: _Worker) -> None:
        if worker.usable:
            self._idle[worker.size] = worker
            while len(self._idle) > _MAX_IDLE:
                self._idle.pop(next(iter(self._idle))).end()
        else:
            worker.end()


class _ForkServer:
    """Python's fork server would run the caller's main module."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
            "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: tuple, *descriptors: int) -> Any:
        """See worker.py."""
        try:
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            answer = self._socket.recv(1 << 20)
        except OSError as error:
            raise RuntimeError(f"the process that starts workers has ended: {error}") from error
        if not answer:
            raise RuntimeError(
                f"the process that starts workers ended with status {self._process.wait()}; "
                "see its output in the standard error of this process"
            )
        return pickle.loads(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class _Worker:
    """``usable``: whether another call may be sent to it."""

    def __init__(self, server: _ForkServer, size: int, programs: str | None) -> None:
        self.size = size
        self.usable = True
        self.fresh = True
        self._server = server
        self._status: int | None = None
        self._output = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        # Else JAX, once imported by an earlier call, waits 8 minutes for a TPU host's metadata.
        own = {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(size)}
        request = ("start", size, programs, {**os.environ, **own})
        with theirs:
            self._pid = server.ask(request, theirs.fileno(), self._output.fileno())
        self._connection = Connection(ours.detach())

    def status(self, seconds: float = 0.0) -> int | None:
        """As ``Popen.returncode``; ``None`` if it still runs after ``seconds``."""
        if self._status is None:
            self._status = self._server.ask(("wait", self._pid, seconds))
        return self._status

    def run(self, call: bytes, timeout: float) -> list[Any]:
        start = self._output.seek(0, os.SEEK_END)
        self.usable = False  # until it answers
        limit = timeout + (_START_SECONDS if self.fresh else 0.0)
        try:
            self._connection.send((list(sys.path), os.getcwd(), call))
            if not self._connection.poll(limit):
                raise self._timed_out(limit, start)
            results, failure, self.usable = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(start) from error
        self.fresh = False
        output = self._printed(start)
        if failure is None:
            sys.stderr.write(output)
            return [pickle.loads(result) for result in results]
        text, data, cause = failure
        raised = loads_or_none(data) or RuntimeError(text)
        raised.__cause__ = loads_or_none(cause)
        if output and sys.version_info >= (3, 11):
            raised.add_note(f"Printed by the ranks:\n{output}")
        raise raised

    def end(self) -> None:
        self._connection.close()  # ends an idle worker
        if self.status(2.0 if self.usable else 0.0) is None:
            self._signal(signal.SIGKILL)
            self.status(60.0)
        self._output.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.status() is None:  # the id is valid until the server has waited for it
            os.kill(self._pid, number)

    def _printed(self, start: int) -> str:
        self._output.seek(start)
        return self._output.read().decode(errors="replace")

    def _timed_out(self, limit: float, start: int) -> RankTimeoutError:
        before = self._output.seek(0, os.SEEK_END)
        printed = self._printed(start)
        self._signal(signal.SIGUSR1)  # its faulthandler prints all stacks
        time.sleep(2.0)
        stacks = self._printed(before)
        return RankTimeoutError(
            f"{self.size} ranks had not finished after {limit:g} s, so their process was killed. "
            f"Stacks of its threads:\n{stacks}\nPrinted before:\n{printed}"
        )

    def _died(self, start: int) -> WorkerDiedError:
        status = self.status(5.0)
        killer = signal.Signals(-status) if status is not None and status < 0 else None
        how = "its connection closed" if status is None else f"status {status}"
        error = WorkerDiedError(
            f"the process of the {self.size} ranks ended "
            f"({f'signal {killer.name}' if killer else how}). It printed:\n{self._printed(start)}"
        )
        error.signal = killer
        return error


def _dumps_call(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    import cloudpickle

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
    """Keeps the file names of functions, which cloudpickle omits since 3.1.3."""
    import cloudpickle

    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    def with_file(code: CodeType) -> tuple:
        make, parts = reduce(code)
        return make, tuple(code.co_filename if p == "<dynamic-code>" else p for p in parts)

    class FileNamePickler(cloudpickle.Pickler):
        dispatch_table = ChainMap({CodeType: with_file}, cloudpickle.Pickler.dispatch_table)

    return FileNamePickler(buffer)


def _importable(module: ModuleType) -> bool:
    """Whether the worker would import the same file."""
    if module.__name__ == "__main__":
        return True  # cloudpickle sends its contents
    path = None
    spec = None
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    assert spec is not None
    return spec.origin is None or spec.origin == getattr(module, "__file__", None)
