"""The result of one check, as one line of text."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ..wording import printable, runs

_GROUPS = 6  # the most different findings in one line


class Status(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # training may start, but its setup may be wrong
    FAILED = "FAILED"  # training would not start, or would fail
    SKIPPED = "skipped"  # not checked, because of an earlier failure


@dataclass(frozen=True)
class Check:
    """``found``, ``expected``, ``remedy`` are clauses; the last two are "" if the check is ok."""

    status: Status
    name: str
    found: str
    expected: str = ""
    remedy: str = ""

    def line(self) -> str:
        parts = [f"{self.status.value:<8} {self.name:<20} {self.found}"]
        if self.expected:
            parts.append(f"expected: {self.expected}")
        if self.remedy:
            parts.append(f"remedy: {self.remedy}")
        return printable(" | ".join(parts))


def ok(name: str, found: str) -> Check:
    return Check(Status.OK, name, found)


def warning(name: str, found: str, expected: str, remedy: str) -> Check:
    return Check(Status.WARNING, name, found, expected, remedy)


def failed(name: str, found: str, expected: str, remedy: str) -> Check:
    return Check(Status.FAILED, name, found, expected, remedy)


def skipped(name: str, found: str) -> Check:
    return Check(Status.SKIPPED, name, found)


def by_worker(findings: Mapping[int, str]) -> str:
    """Lists findings by worker, equal ones together: "workers 0-2: 2.9.0; worker 3: 2.8.0"."""
    groups: dict[str, list[int]] = {}
    for worker, finding in sorted(findings.items()):
        groups.setdefault(finding, []).append(worker)
    shown = [f"{runs('worker', group)}: {text}" for text, group in groups.items()]
    more = [f"and {len(shown) - _GROUPS} other findings"] if len(shown) > _GROUPS else []
    return "; ".join(shown[:_GROUPS] + more)
