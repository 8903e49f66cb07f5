"""The report on a verification, with all that can be done with it."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict

from ..planning.compiling.cache import write_whole
from ..planning.reporting.storage import target, target_of_page
from ..planning.reporting.tables import aligned
from .findings import CPU_NOTE, Measured
from .records import Status
from .tables import sections

_FORMAT, _VERSION = "xla_fsdp verification", 1


class Verification(Measured):
    """What was found: ``print`` it, ``save`` it, ``plot`` it; ``calibration`` is for plans."""

    def __repr__(self) -> str:
        return f"<Verification {self.verdict}>"

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [CPU_NOTE] if self.where.family == "cpu" else []
        for found in self.findings:
            lines += textwrap.wrap(found.line(), 110, subsequent_indent=" " * 37)
        for section in sections(self):
            table = [(section.title, *section.columns)]
            table += [(f"  {row[0]}", *row[1:]) for row in section.rows]
            lines += ["", *aligned(table, [False, *section.numeric()[1:]])]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it, for programs."""
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "ok": self.ok,
            "where": asdict(self.where),
            "findings": [{**asdict(f), "status": f.status.value} for f in self.findings],
            "rates": [asdict(rate) | {"value": rate.value} for rate in self.rates],
            "collectives": [asdict(time) for time in self.collectives],
            "steps": [asdict(run) for run in self.steps],
            "planned_for": self.planned_for,
            "calibration": {
                name: getattr(self.calibration, name)
                for name in self.calibration.__dataclass_fields__
                if name != "about"
            },
        }
        return json.dumps(data, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON. The file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        write_whole(target(path), self.to_json().encode())

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes one HTML page that needs nothing else: findings, curves, tables.

        Raises:
            ValueError: the path does not end in .html.
            FileNotFoundError: there is no such folder.
            MissingExtraError: (an ImportError) matplotlib is not installed.
        """
        place = target_of_page(path)
        from .page import page  # with matplotlib, which printing and saving do without

        write_whole(place, page(self).encode())

    def failures(self) -> list[str]:
        """Names of what must hold and does not."""
        return [found.name for found in self.findings if found.status is Status.FAILED]
