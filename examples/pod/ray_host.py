"""Runs a command on one host and returns its output: the actor of ray_train.py, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

# Replaces the exit code if the host does not answer any more.
LOST = -1000

# Ray sets these for actors that use only some chips of their host, but this actor uses all.
RAYS_OWN = ("TPU_VISIBLE_CHIPS",)


class Polled(NamedTuple):
    """``lines``: output since the last poll. ``code``: exit code, None while the command runs."""

    lines: list[str]
    code: int | None


class Host:
    """Runs one command on one host."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: str | None = None,
        grace: float = 30.0,  # seconds for the ranks to save
    ) -> None:
        """Starts ``command`` with the actor's environment and ``environment``."""
        self._grace = grace
        self._process: subprocess.Popen | None = None
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        merged = {name: value for name, value in os.environ.items() if name not in RAYS_OWN}
        merged |= {"PYTHONUNBUFFERED": "1", **environment}
        try:
            # A new session, so that the processes of its ranks can be ended with it.
            self._process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=merged,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self._lines.put(f"cannot start {command[0]}: {error.strerror}: {error.filename}")
            return
        # This process ends the command if the actor is killed, which closes the actor's pipe.
        self._guard = subprocess.Popen(
            ["sh", "-c", 'cat; kill -9 "-$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def poll(self, seconds: float = 1.0) -> Polled:
        """Waits up to ``seconds`` for output or for the end of the command."""
        lines = self._read_lines(seconds)
        if self._process is None:
            return Polled(lines, 127)
        code = self._process.poll()
        if code is None:
            return Polled(lines, None)
        # If the command was killed, its ranks still keep the output open and wait in a collective.
        self._signal(signal.SIGKILL)
        self._reader.join()
        self._dismiss_guard()
        # A shell's convention for signals: 128 + number.
        return Polled(lines + self._read_lines(0.0), code if code >= 0 else 128 - code)

    def _read_lines(self, seconds: float) -> list[str]:
        lines = []
        try:
            lines.append(self._lines.get(timeout=seconds))
            while True:
                lines.append(self._lines.get_nowait())
        except Empty:
            return [line for line in lines if line is not None]

    def stop(self) -> None:
        """Ends the command and all that it started; SIGKILL after the grace period."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and self._signal(0):
            self._process.poll()
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._dismiss_guard()

    def _dismiss_guard(self) -> None:
        self._guard.kill()  # before its pipe closes
        self._guard.communicate()

    def _signal(self, number: int) -> bool:
        """Sends a signal; returns whether there was still a process."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _read(self, process: subprocess.Popen) -> None:
        with process.stdout:
            for line in process.stdout:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)  # wakes who waits for a line
