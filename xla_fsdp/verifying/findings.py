"""What a verification found: the figures that its report prints and draws."""

from __future__ import annotations

from dataclasses import dataclass

from ..tpu.calibration import Calibration
from .records import CollectiveTime, Finding, Rate, Status, StepRun, Where

CPU_NOTE = (
    "Ranks are threads of one CPU here: what is right is right, and times say nothing of a TPU."
)


@dataclass(frozen=True, repr=False)
class Measured:
    """``planned_for``: the slice that the steps were planned for, "" if they were not."""

    where: Where
    findings: tuple[Finding, ...]
    rates: tuple[Rate, ...]
    collectives: tuple[CollectiveTime, ...]
    steps: tuple[StepRun, ...]
    calibration: Calibration
    planned_for: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything that must hold does; figures may be others than published."""
        return not any(found.status is Status.FAILED for found in self.findings)

    @property
    def verdict(self) -> str:
        """One line."""
        counts = {status: 0 for status in Status}
        for found in self.findings:
            counts[found.status] += 1
        shown = ", ".join(f"{n} {status.value}" for status, n in counts.items() if n)
        what = "AS PROMISED" if self.ok else "NOT AS PROMISED"
        on = f"{self.where.ranks} ranks on {self.where.device or 'unknown devices'}"
        return f"{what}: {shown or 'nothing was looked at'} ({on})"
