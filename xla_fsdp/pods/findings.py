"""The result of one check, and the errors that end a preflight early."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ..wording import printable, runs

_GROUPS = 6


class Status(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # training may start, but its setup may be wrong
    DIFFERENT = "different"  # from the figure that plans use
    FAILED = "FAILED"  # training would not start, fail or be wrong
    SKIPPED = "skipped"  # ``found`` has the reason


@dataclass(frozen=True)
class Finding:
    """``found`` and ``expected`` are clauses; ``remedy`` may be ""."""

    status: Status
    name: str
    found: str
    expected: str = ""
    remedy: str = ""

    def line(self) -> str:
        parts = [f"{self.status.value:<8} {self.name:<20} {self.found}"]
        parts += [f"expected: {self.expected}"] if self.expected else []
        parts += [f"remedy: {self.remedy}"] if self.remedy else []
        return printable(" | ".join(parts))


ok = partial(Finding, Status.OK)
warning = partial(Finding, Status.WARNING)
failed = partial(Finding, Status.FAILED)
skipped = partial(Finding, Status.SKIPPED)


def count_by_status(findings: Iterable[Finding]) -> str:
    """``"20 ok, 2 FAILED"``."""
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])


def by_worker(findings: Mapping[int, str]) -> str:
    """Lists equal findings together: "workers 0-2: 2.9.0; worker 3: 2.8.0"."""
    groups: dict[str, list[int]] = {}
    for worker, finding in sorted(findings.items()):
        groups.setdefault(finding, []).append(worker)
    shown = [f"{runs('worker', group)}: {text}" for text, group in groups.items()]
    more = [f"and {len(shown) - _GROUPS} other findings"] if len(shown) > _GROUPS else []
    return "; ".join(shown[:_GROUPS] + more)


class UsageError(Exception):
    """The user must change flags, credentials or the name before any check can run."""


class ApiError(Exception):
    """The TPU API's answer is unexpected or missing; ``passing``: this may be temporary."""

    def __init__(self, found: str, expected: str, remedy: str, passing: bool = False) -> None:
        super().__init__(found)
        self.found, self.expected, self.remedy, self.passing = found, expected, remedy, passing
