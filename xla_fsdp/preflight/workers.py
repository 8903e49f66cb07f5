"""Asks all workers of a node the same thing, at the same time, each with a time limit."""

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

from ..wording import in_a_line
from .errors import UsageError
from .node import Endpoint
from .template import Template
from .where import Where

_KEPT = 1 << 20  # bytes of what a command says; the rest is read and dropped
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True)
class _Outcome:
    """``code`` is ``None`` if the command was stopped at its time limit. Times are those of this
    machine's clock, in seconds since 1970."""

    out: str
    err: str
    code: int | None
    started: float
    ended: float


def _run_all(
    commands: Mapping[int, Sequence[str]], seconds: float, at_once: int
) -> dict[int, _Outcome]:
    """Runs all commands, ``at_once`` at a time, each for at most ``seconds``; never waits longer.

    Raises:
        OSError: one cannot be started.
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

    def end(self) -> _Outcome:
        ended, code = time.time(), self._process.poll()
        if code is None:
            self.kill()
        until = time.monotonic() + _LAST_WORDS_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        out, err = (bytes(said).decode("utf-8", "replace") for said in (self._out, self._err))
        return _Outcome(out, err, code, self._started, ended)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_SECONDS)


def _keep(stream: BufferedReader, said: bytearray) -> None:
    with stream:
        for chunk in iter(lambda: stream.read1(1 << 16), b""):
            said += chunk[: _KEPT - len(said)]


@dataclass(frozen=True)
class Answer:
    """What a worker said to one request.

    ``data``: its answer; empty if ``problem`` says why there is none.
    ``started``, ``ended``: when it was asked and had answered, by this machine's clock.
    """

    data: Mapping[str, Any]
    problem: str
    started: float
    ended: float


class Workers:
    """The workers of a node, by number.

    Args:
        python: the interpreter there, as the shell there reads it.
        seconds: for one answer.
        at_once: workers asked at a time.
    """

    def __init__(
        self,
        where: Where,
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
        # Unguessable, so that no file or line of another run is taken for one of this.
        self.token = secrets.token_hex(8)
        template.require_telling_apart(len(self._endpoints))

    @property
    def numbers(self) -> list[int]:
        return list(self._endpoints)

    def ask(self, action: str, numbers: Iterable[int], **details: Any) -> dict[int, Answer]:
        """Sends one request to each of the workers ``numbers``, and waits for all answers.

        Raises:
            UsageError: the command that reaches them cannot be started.
        """
        requests = {number: {"action": action, "worker": number, **details} for number in numbers}
        return self.ask_each(requests)

    def ask_each(self, requests: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """As ``ask``, with a request for each."""
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
            return in_a_line(data["error"])
        if data:
            return ""
        if outcome.code is None:
            return f"no answer in {self._seconds:g} s"
        said = _reason(outcome.err) or _reason(outcome.out) or "and said nothing"
        if outcome.code:
            return f"the command ended with {outcome.code}: {said}"
        return f"it answered something else: {said}"


def _program(request: Mapping[str, Any]) -> str:
    """The probe and what it is asked, as one line that no shell finds anything to change in."""
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    text += f"\nmain({json.dumps(request)!r})\n"
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")
    return f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'


def _reason(text: str) -> str:
    """Where a command says why it ended: gcloud after ERROR, ssh and Python on the last line."""
    lines = text.strip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("ERROR")]
    return in_a_line(" ".join(lines[errors[-1] if errors else -1 :]))


def _own_line(text: str, token: str) -> Mapping[str, Any]:
    """The line of ``text`` that the probe printed; empty if it printed none."""
    for line in text.splitlines():
        if line.startswith("{") and token in line:
            try:
                data = json.loads(line)
            except ValueError:
                continue
            if isinstance(data, dict) and data.get("token") == token:
                return data
    return {}
