"""Sends a request to all workers of a node at the same time, each with a time limit."""

from __future__ import annotations

import base64
import json
import secrets
import shlex
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..wording import to_one_line
from .commands import Outcome, run_all
from .findings import UsageError
from .node import Endpoint, NodeLocation

GCLOUD = (
    "gcloud compute tpus tpu-vm ssh {tpu} --zone {zone} --project {project} --worker {worker} "
    "--command {command}"
)
_FIELDS = ("tpu", "zone", "project", "worker", "address", "external_address", "command")
_DISTINGUISHING_FIELDS = ("{worker}", "{address}", "{external_address}")


class Template:
    """The user's command that runs a program on a worker; UsageError if it is wrong.

    It is split before its fields are replaced, so that ``{command}`` is a single argument.
    """

    def __init__(self, text: str) -> None:
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--worker_command {text!r}: {error}") from None
        self.text = text
        if not any("{command}" in word for word in self._words):
            raise UsageError(f"--worker_command {text!r} must contain {{command}}")
        program = self.fill(dict.fromkeys(_FIELDS, "x"))[0]
        if shutil.which(program) is None:
            raise UsageError(
                f"there is no command {program}: install it, or give --worker_command (such as "
                "'ssh {address} {command}') or --skip_workers"
            )

    def fill(self, values: Mapping[str, str]) -> list[str]:
        try:
            return [word.format_map(values) for word in self._words]
        except (KeyError, ValueError, IndexError, AttributeError):
            fields = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise UsageError(
                f"--worker_command {self.text!r} has an unknown field or a single brace: allowed "
                f"are {fields}; write {{{{ for a brace"
            ) from None


@dataclass(frozen=True)
class WorkerAnswer:
    """``data`` is empty if there is a ``problem``; times by this machine's clock."""

    data: Mapping[str, Any]
    problem: str
    started: float
    ended: float


@dataclass
class Workers:
    """The workers of a node, by number; UsageError if the template cannot tell them apart.

    ``python``: the interpreter on the workers, quoted; ``seconds``: time limit of one answer.
    """

    where: NodeLocation
    endpoints: Sequence[Endpoint]
    template: Template
    python: str
    seconds: float
    at_once: int

    def __post_init__(self) -> None:
        count, text = len(self.endpoints), self.template.text
        self.numbers = list(range(count))
        # Distinguishes the files and lines of other runs.
        self.token = secrets.token_hex(8)
        if count > 1 and not any(field in text for field in _DISTINGUISHING_FIELDS):
            raise UsageError(
                f"--worker_command {text!r} is the same for all {count} workers: "
                f"it must contain {' or '.join(_DISTINGUISHING_FIELDS)}"
            )

    def ask(self, action: str, numbers: Iterable[int], **details: Any) -> dict[int, WorkerAnswer]:
        """Sends one request with ``details`` to each of ``numbers``, and waits for all answers."""
        common = {"token": self.token, "seconds": self.seconds, "action": action, **details}
        commands = {}
        for number in numbers:
            request = {**common, "worker": number}
            endpoint = self.endpoints[number]
            values = {
                **vars(self.where),
                "worker": str(number),
                "address": endpoint.address,
                "external_address": endpoint.external or endpoint.address,
                "command": f"{self.python} -c {shlex.quote(_probe_command(request))}",
            }
            commands[number] = self.template.fill(values)
        try:
            outcomes = run_all(commands, self.seconds, self.at_once)
        except OSError as error:
            raise UsageError(f"the command for the workers cannot be started: {error}") from error
        return {number: self._answer(outcome) for number, outcome in sorted(outcomes.items())}

    def _answer(self, outcome: Outcome) -> WorkerAnswer:
        data, problem = _own_line(outcome.out, self.token), ""
        if "error" in data:
            problem = to_one_line(data["error"])
        elif not data and outcome.code is None:
            problem = f"no answer in {self.seconds:g} s"
        elif not data:
            ended = f"the command ended with {outcome.code}"
            ended = ended if outcome.code else "the answer is not from the probe"
            problem = f"{ended}: {to_one_line(outcome.reason)}"
        return WorkerAnswer(data, problem, outcome.started, outcome.ended)


def _probe_command(request: Mapping[str, Any]) -> str:
    """The probe and its request, as one line that a shell leaves unchanged."""
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    text += f"\nmain({json.dumps(request)!r})\n"
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")
    return f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'


def _own_line(text: str, token: str) -> Mapping[str, Any]:
    """The probe's answer; empty if there is none."""
    for line in text.splitlines():
        if line.startswith("{") and token in line:
            try:
                data = json.loads(line)
            except ValueError:
                continue
            if isinstance(data, dict) and data.get("token") == token:
                return data
    return {}
