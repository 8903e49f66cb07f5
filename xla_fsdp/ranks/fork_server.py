"""Starts workers by forking a process that has imported torch_xla already.

The import takes seconds, a fork milliseconds. Python's fork server would run the caller's main
module again; this one does not. It starts neither a thread nor an XLA runtime, so that its forks
can start them.

Requests and replies are pickled, one in each packet. ``("start", size, programs, environment)``
comes with the two file descriptors of the worker; the reply is its process id. The reply to
``("wait", pid, seconds)`` is the worker's exit status, or None if it is still running.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

_LARGEST = 1 << 20  # bytes of a request, which contains the environment


class ForkServer:
    """The process of the server. It and its workers end when this object is closed or deleted."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
            "OPENBLAS_NUM_THREADS": "1",  # otherwise importing numpy starts threads
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, size: int, programs: str | None, connection: int, output: int) -> ForkedProcess:
        """Starts a worker of ``size`` ranks with the current environment of this process.

        It communicates over the socket with the file descriptor ``connection``, prints into
        ``output``, and stores compiled programs in the folder ``programs``.
        """
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(size)}
        request = ("start", size, programs, environment)
        return ForkedProcess(self, self._ask(request, connection, output))

    def wait(self, pid: int, seconds: float) -> int | None:
        """The worker's exit status, as ``Popen.returncode``; None if it runs after ``seconds``."""
        return self._ask(("wait", pid, seconds))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _ask(self, request: tuple, *descriptors: int) -> Any:
        try:
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            answer = self._socket.recv(_LARGEST)
        except OSError as error:
            raise RuntimeError(f"the process that starts workers has ended: {error}") from error
        if not answer:
            raise RuntimeError(
                f"the process that starts workers ended with status {self._process.wait()}; "
                "see its output in the standard error of this process"
            )
        return pickle.loads(answer)


class ForkedProcess:
    """A worker's process, with the methods of ``subprocess.Popen`` that are used for workers."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._poll(0.0)

    def wait(self, timeout: float = 60.0) -> int:
        status = self._poll(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # the process id stays valid until the server has waited for it
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _poll(self, seconds: float) -> int | None:
        if self._status is None:
            self._status = self._server.wait(self.pid, seconds)
        return self._status


def main() -> NoReturn:
    """Entry point of ``python -m xla_fsdp.ranks.fork_server SOCKET_FD``."""
    gc.disable()  # imported modules stay: garbage collection need not scan them, also in workers
    from . import worker
    from .cpu.operators import look_up_operators

    look_up_operators()

    gc.freeze()
    gc.enable()
    server = socket.socket(fileno=int(sys.argv[1]))
    while True:
        packet, descriptors, _, _ = socket.recv_fds(server, _LARGEST, 2)
        if not packet:  # the process that started this server has ended
            os._exit(0)
        kind, *request = pickle.loads(packet)
        if kind == "wait":
            server.send(pickle.dumps(_wait(*request)))
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
            worker.serve(connection, size, programs)
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(pickle.dumps(pid))


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


if __name__ == "__main__":
    main()
