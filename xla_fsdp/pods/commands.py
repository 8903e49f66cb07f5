"""Runs other programs at the same time, each with a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader

from ..wording import to_one_line

MAX_OUTPUT = 1 << 20
_POLL_SECONDS = 0.05
_OUTPUT_SECONDS = 1.0
_ERROR = re.compile(r"ERROR|[\w.]*(Error|Exception|Interrupt)\b")


@dataclass(frozen=True)
class Outcome:
    """``code`` is ``None`` at the time limit; ``started`` and ``ended`` are ``time.time()``."""

    out: str
    err: str
    code: int | None
    started: float
    ended: float

    @property
    def reason(self) -> str:
        """From the last line that begins as an error of gcloud or Python, else the last line."""
        lines = (self.err.strip() or self.out.strip() or "it printed nothing").splitlines()
        errors = [number for number, line in enumerate(lines) if _ERROR.match(line)]
        return to_one_line(" ".join(lines[errors[-1] if errors else -1 :]), 900)


def run_all(
    commands: Mapping[int, Sequence[str]],
    seconds: float,
    at_once: int = 1,
    environment: Mapping[str, str] | None = None,
    kill_rest: bool = False,
) -> dict[int, Outcome]:
    """Runs all commands, ``at_once`` at a time, each for at most ``seconds``.

    ``kill_rest``: whether to kill what a command has started and left behind. Raises OSError if a
    command cannot be started.
    """
    over = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            results = {
                number: pool.submit(_run_one, argv, seconds, environment, kill_rest, over)
                for number, argv in commands.items()
            }
            return {number: result.result() for number, result in results.items()}
        finally:
            over.set()
            pool.shutdown(cancel_futures=True)


def _run_one(
    argv: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None,
    kill_rest: bool,
    over: threading.Event,
) -> Outcome:
    started, until = time.time(), time.monotonic() + seconds
    # A new session: a kill also ends the command's children, and Ctrl-C does not reach them.
    process = subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    texts = bytearray(), bytearray()
    # Daemons: a grandchild may keep the command's output open.
    readers = [
        threading.Thread(target=_read_output, args=pair, daemon=True)
        for pair in zip((process.stdout, process.stderr), texts, strict=True)
    ]
    for reader in readers:
        reader.start()
    while process.poll() is None and time.monotonic() < until and not over.is_set():
        time.sleep(_POLL_SECONDS)
    ended, code = time.time(), process.poll()
    if code is None or kill_rest:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_OUTPUT_SECONDS)
    until = time.monotonic() + _OUTPUT_SECONDS
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    out, err = (bytes(text).decode("utf-8", "replace") for text in texts)
    return Outcome(out, err, code, started, ended)


def _read_output(stream: BufferedReader, output: bytearray) -> None:
    with stream:
        for chunk in iter(lambda: stream.read1(1 << 16), b""):
            output += chunk
            del output[:-MAX_OUTPUT]
