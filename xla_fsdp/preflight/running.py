"""Runs commands beside each other, each with a time limit, and never waits for longer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader

_KEPT = 1 << 20  # bytes of what a command says; the rest is read and dropped
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """``code`` is ``None`` if the command was stopped at its time limit. Times are those of this
    machine's clock, in seconds since 1970."""

    out: str
    err: str
    code: int | None
    started: float
    ended: float


def run_all(
    commands: Mapping[int, Sequence[str]], seconds: float, at_once: int
) -> dict[int, Outcome]:
    """Runs all commands, ``at_once`` at a time, each for at most ``seconds``.

    Raises:
        OSError: one cannot be started.
    """
    waiting = list(commands.items())
    running: dict[int, _Running] = {}
    ended: dict[int, Outcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, argv = waiting.pop(0)
                running[number] = _Running(argv)
            time.sleep(_POLL_SECONDS)
            for number in [n for n, one in running.items() if one.is_over(seconds)]:
                ended[number] = running.pop(number).end()
    finally:
        for one in running.values():  # after an error, or Ctrl-C
            one.kill()
    return ended


class _Running:
    """A command and what it has said so far."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._started, self._began = time.time(), time.monotonic()
        # A session of its own: ssh under gcloud is stopped with it, and Ctrl-C is ours alone.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._out, self._err = bytearray(), bytearray()
        streams = ((self._process.stdout, self._out), (self._process.stderr, self._err))
        # Daemons: a grandchild that outlives the command may hold its output open for ever.
        self._readers = [threading.Thread(target=_keep, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    def is_over(self, seconds: float) -> bool:
        over_time = time.monotonic() - self._began > seconds
        return over_time or self._process.poll() is not None

    def end(self) -> Outcome:
        ended, code = time.time(), self._process.poll()
        if code is None:
            self.kill()
        until = time.monotonic() + _LAST_WORDS_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        out, err = (bytes(said).decode("utf-8", "replace") for said in (self._out, self._err))
        return Outcome(out, err, code, self._started, ended)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_SECONDS)


def _keep(stream: BufferedReader, said: bytearray) -> None:
    with stream:
        for chunk in iter(lambda: stream.read1(1 << 16), b""):
            said += chunk[: _KEPT - len(said)]
