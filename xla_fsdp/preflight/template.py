"""The user's template of the command that runs a program on a worker."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping

from .errors import UsageError
from .node import Endpoint
from .where import NodeLocation

GCLOUD = (
    "gcloud compute tpus tpu-vm ssh {tpu} --zone {zone} --project {project} --worker {worker} "
    "--command {command}"
)
_FIELDS = ("tpu", "zone", "project", "worker", "address", "external_address", "command")
_DISTINGUISHING_FIELDS = ("{worker}", "{address}", "{external_address}")


class Template:
    """A template, split like a shell command before its fields are replaced.

    So ``{command}`` is always a single argument: a line for the shell on the worker.

    Raises:
        UsageError: it has no ``{command}`` or has unknown fields, or the program is not installed.
    """

    def __init__(self, text: str) -> None:
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--worker_command {text!r}: {error}") from None
        self._text = text
        if not any("{command}" in word for word in self._words):
            raise UsageError(f"--worker_command {text!r} must contain {{command}}")
        trial = self._fill(dict.fromkeys(_FIELDS, "x"))
        if shutil.which(trial[0]) is None:
            raise UsageError(
                f"there is no command {trial[0]}: install it, or give --worker_command (such as "
                "'ssh {address} {command}') or --skip_workers"
            )

    def argv(self, where: NodeLocation, worker: int, endpoint: Endpoint, command: str) -> list[str]:
        return self._fill(
            {
                "tpu": where.tpu,
                "zone": where.zone,
                "project": where.project,
                "worker": str(worker),
                "address": endpoint.address,
                "external_address": endpoint.external or endpoint.address,
                "command": command,
            }
        )

    def require_distinct_commands(self, workers: int) -> None:
        """Raises UsageError if the command would reach the same worker for all of them."""
        if workers > 1 and not any(field in self._text for field in _DISTINGUISHING_FIELDS):
            raise UsageError(
                f"--worker_command {self._text!r} is the same for all {workers} workers: it must "
                f"contain {' or '.join(_DISTINGUISHING_FIELDS)}"
            )

    def _fill(self, values: Mapping[str, str]) -> list[str]:
        try:
            return [word.format_map(values) for word in self._words]
        except (KeyError, ValueError, IndexError, AttributeError):
            fields = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise UsageError(
                f"--worker_command {self._text!r} has an unknown field or a single brace: allowed "
                f"are {fields}; write {{{{ for a brace"
            ) from None
