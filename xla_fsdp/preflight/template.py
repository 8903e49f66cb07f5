"""The command that reaches a worker, as the user writes it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping

from .errors import UsageError
from .node import Endpoint
from .where import Where

GCLOUD = (
    "gcloud compute tpus tpu-vm ssh {tpu} --zone {zone} --project {project} --worker {worker} "
    "--command {command}"
)
_FIELDS = ("tpu", "zone", "project", "worker", "address", "external_address", "command")
_TELLING_APART = ("{worker}", "{address}", "{external_address}")


class Template:
    """``text`` is split as a shell would, then filled in: ``{command}`` stays a single argument,
    a line for the shell at the far end, whatever is in it.

    Raises:
        UsageError: it has no ``{command}`` or names unknown fields, or there is no such program.
    """

    def __init__(self, text: str) -> None:
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--worker_command {text!r}: {error}") from None
        self._text = text
        if not any("{command}" in word for word in self._words):
            raise UsageError(f"--worker_command {text!r} lacks {{command}}")
        trial = self._fill(dict.fromkeys(_FIELDS, "x"))
        if shutil.which(trial[0]) is None:
            raise UsageError(
                f"there is no command {trial[0]}: install it, or give --worker_command (such as "
                "'ssh {address} {command}') or --skip_workers"
            )

    def argv(self, where: Where, worker: int, endpoint: Endpoint, command: str) -> list[str]:
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

    def require_telling_apart(self, workers: int) -> None:
        """Raises UsageError if the command would reach the same one of several workers always."""
        if workers > 1 and not any(field in self._text for field in _TELLING_APART):
            raise UsageError(
                f"--worker_command {self._text!r} is the same for all {workers} workers: it lacks "
                f"{' or '.join(_TELLING_APART)}"
            )

    def _fill(self, values: Mapping[str, str]) -> list[str]:
        try:
            return [word.format_map(values) for word in self._words]
        except (KeyError, ValueError, IndexError, AttributeError):
            fields = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise UsageError(
                f"--worker_command {self._text!r}: there are {fields}; write {{{{ for a brace"
            ) from None
