"""Sends a request to all workers of a node at the same time, each with a time limit."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..wording import to_one_line
from .errors import UsageError
from .node import Endpoint
from .template import Template
from .where import NodeLocation

_MAX_OUTPUT = 1 << 20  # bytes of a command's output that are kept; the rest is read and dropped
_POLL_SECONDS = 0.05
_OUTPUT_SECONDS = 1.0


@dataclass(frozen=True)
class _Outcome:
    """The result of a command.

    ``code`` is ``None`` if the command was stopped at its time limit. Times are in seconds since
    1970, by this machine's clock.
    """

    out: str
    err: str
    code: int | None
    started: float
    ended: float


def _run_all(
    commands: Mapping[int, Sequence[str]], seconds: float, at_once: int
) -> dict[int, _Outcome]:
    """Runs all commands, ``at_once`` at a time, each for at most ``seconds``.

    Raises:
        OSError: a command cannot be started.
    """
    waiting = list(commands.items())
    running: dict[int, _Running] = {}
    ended: dict[int, _Outcome] = {}
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
    """A running command and its output so far."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._started, self._began = time.time(), time.monotonic()
        # A new session, so that killing it also stops ssh under gcloud, and so that Ctrl-C only
        # reaches this process.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._out, self._err = bytearray(), bytearray()
        streams = ((self._process.stdout, self._out), (self._process.stderr, self._err))
        # Daemons, because a grandchild that outlives the command may keep its output open.
        self._readers = [
            threading.Thread(target=_read_output, args=pair, daemon=True) for pair in streams
        ]
        for reader in self._readers:
            reader.start()

    def is_over(self, seconds: float) -> bool:
        over_time = time.monotonic() - self._began > seconds
        return over_time or self._process.poll() is not None

    def end(self) -> _Outcome:
        ended, code = time.time(), self._process.poll()
        if code is None:
            self.kill()
        until = time.monotonic() + _OUTPUT_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        out, err = (bytes(output).decode("utf-8", "replace") for output in (self._out, self._err))
        return _Outcome(out, err, code, self._started, ended)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_OUTPUT_SECONDS)


def _read_output(stream: BufferedReader, output: bytearray) -> None:
    with stream:
        for chunk in iter(lambda: stream.read1(1 << 16), b""):
            output += chunk[: _MAX_OUTPUT - len(output)]


@dataclass(frozen=True)
class Answer:
    """A worker's answer to one request.

    ``data``: its answer; empty if there is none, and then ``problem`` has the reason.
    ``started``, ``ended``: the times of the request and of the answer, by this machine's clock.
    """

    data: Mapping[str, Any]
    problem: str
    started: float
    ended: float


class Workers:
    """The workers of a node, by number.

    Args:
        python: the interpreter on the workers, quoted for their shell.
        seconds: time limit of one answer.
        at_once: number of workers that are queried at the same time.
    """

    def __init__(
        self,
        where: NodeLocation,
        endpoints: Iterable[Endpoint],
        template: Template,
        *,
        python: str,
        seconds: float,
        at_once: int,
    ) -> None:
        self._where = where
        self._endpoints = dict(enumerate(endpoints))
        self._template = template
        self._python = python
        self._seconds = seconds
        self._at_once = at_once
        # Random, so that files and lines of other runs are not confused with those of this one.
        self.token = secrets.token_hex(8)
        template.require_distinct_commands(len(self._endpoints))

    @property
    def numbers(self) -> list[int]:
        return list(self._endpoints)

    def ask(self, action: str, numbers: Iterable[int], **details: Any) -> dict[int, Answer]:
        """Sends one request to each of the workers ``numbers``, and waits for all answers.

        Raises:
            UsageError: the worker command cannot be started.
        """
        requests = {number: {"action": action, "worker": number, **details} for number in numbers}
        return self.ask_each(requests)

    def ask_each(self, requests: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """Like ``ask``, with a separate request for each worker."""
        common = {"token": self.token, "seconds": self._seconds}
        commands = {}
        for number, request in requests.items():
            command = f"{self._python} -c {shlex.quote(_program({**common, **request}))}"
            endpoint = self._endpoints[number]
            commands[number] = self._template.argv(self._where, number, endpoint, command)
        try:
            outcomes = _run_all(commands, self._seconds, self._at_once)
        except OSError as error:
            raise UsageError(f"the command for the workers cannot be started: {error}") from error
        return {number: self._answer(outcome) for number, outcome in sorted(outcomes.items())}

    def _answer(self, outcome: _Outcome) -> Answer:
        data = _own_line(outcome.out, self.token)
        return Answer(data, self._problem(outcome, data), outcome.started, outcome.ended)

    def _problem(self, outcome: _Outcome, data: Mapping[str, Any]) -> str:
        if "error" in data:
            return to_one_line(data["error"])
        if data:
            return ""
        if outcome.code is None:
            return f"no answer in {self._seconds:g} s"
        output = _reason(outcome.err) or _reason(outcome.out) or "it printed nothing"
        if outcome.code:
            return f"the command ended with {outcome.code}: {output}"
        return f"the answer is not from the probe: {output}"


def _program(request: Mapping[str, Any]) -> str:
    """The probe and its request, as one line that a shell leaves unchanged."""
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    text += f"\nmain({json.dumps(request)!r})\n"
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")
    return f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'


def _reason(text: str) -> str:
    """The line with the reason of a failure: gcloud's ERROR, or the last of ssh and Python."""
    lines = text.strip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("ERROR")]
    return to_one_line(" ".join(lines[errors[-1] if errors else -1 :]))


def _own_line(text: str, token: str) -> Mapping[str, Any]:
    """The answer of the probe in the output ``text``; empty if there is none."""
    for line in text.splitlines():
        if line.startswith("{") and token in line:
            try:
                data = json.loads(line)
            except ValueError:
                continue
            if isinstance(data, dict) and data.get("token") == token:
                return data
    return {}
