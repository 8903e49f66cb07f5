"""The processes of ``xla_fsdp.testing``: a server, and the workers that it forks.

The server starts neither a thread nor an XLA runtime, so that its forks can. Packets are pickled.
``("start", size, programs, environment)``, with file descriptors for socket and output, gives a
process id; ``("wait", pid, seconds)`` its exit status, or None if it still runs.

A worker gets ``(sys_path, cwd, pickled (fn, args, kwargs))`` and replies ``(results, failure,
healthy)``; ``failure``: ``None``, or the error as text, the pickled error and its pickled cause.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import os
import pickle
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import torch
import torch_xla.core.xla_model as xm

from ..compiled.cache import enable_compilation_cache
from .cpu.operators import look_up_operators
from .errors import described, portable
from .launch import cpu_runtime, launch
from .spawned import end_with_parent


def main() -> NoReturn:
    """Forks workers, until the process that started this one closes its socket."""
    look_up_operators()
    gc.freeze()
    gc.enable()
    server = socket.socket(fileno=int(sys.argv[1]))
    while True:
        packet, descriptors, _, _ = socket.recv_fds(server, 1 << 20, 2)
        if not packet:
            os._exit(0)
        kind, *request = pickle.loads(packet)
        if kind == "wait":
            server.send(pickle.dumps(_wait_for_child(*request)))
            continue
        pid = os.fork()
        if pid == 0:
            server.close()
            size, programs, environment = request
            os.environ.clear()
            os.environ.update(environment)
            connection, output = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            serve(connection, size, programs)
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(pickle.dumps(pid))


def _wait_for_child(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def serve(descriptor: int, size: int, programs: str | None) -> NoReturn:
    """Runs calls as ``size`` ranks, until the socket is closed."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    end_with_parent(lambda: os._exit(1))
    connection = Connection(descriptor)
    if programs is not None:
        with contextlib.suppress(NotImplementedError):
            enable_compilation_cache(programs)
    random_state = torch.get_rng_state()
    xla_seed: int | None = None
    environment: dict[str, str] = {}
    while True:
        try:
            sys_path, cwd, call = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # skips slow destructors
        sys.path[:] = sys_path
        os.chdir(cwd)
        # Every call starts with the state of the first one.
        torch.set_rng_state(random_state)
        if xla_seed is None:
            cpu_runtime.start(size)
            xla_seed = xm.get_rng_state("xla:0")
            environment = dict(os.environ)
        os.environ.clear()  # libraries leave settings in it
        os.environ.update(environment)
        xm.set_rng_state(xla_seed, "xla:0")
        outcome = _run_call(call, size)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send((*outcome, not cpu_runtime.leftover))


def _run_call(call: bytes, size: int) -> tuple[list[bytes] | None, tuple | None]:
    try:
        fn, args, kwargs = pickle.loads(call)
        results = launch(functools.partial(fn, **kwargs), args, size)
        assert results is not None
        return [_dumps(result, f"the result of rank {r}") for r, result in enumerate(results)], None
    except BaseException as error:
        return None, (described(error), portable(error, _dumps), portable(error.__cause__, _dumps))


class _ToCpuPickler(cloudpickle.Pickler):
    """The receiver of a result has no XLA device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "xla":
            copy = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, obj.requires_grad)
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _dumps(value: Any, what: str = "the exception") -> bytes:
    buffer = io.BytesIO()
    try:
        _ToCpuPickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    return buffer.getvalue()
