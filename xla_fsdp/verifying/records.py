"""The results of a verification as plain data. All times are seconds, all sizes bytes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..tpu.links import wire_bytes


class Status(enum.Enum):
    """The status of a finding."""

    OK = "ok"
    DIFFERENT = "different"  # a measurement differs from the figure that plans use
    FAILED = "FAILED"  # a test failed
    SKIPPED = "skipped"  # could not be checked; ``found`` has the reason


@dataclass(frozen=True)
class Finding:
    """The result of one test or measurement.

    ``name``: its subject; ``expected``: the expected result, and ``found``: the actual one, as
    clauses; ``remedy``: what the user can do, or "".
    """

    status: Status
    name: str
    found: str
    expected: str = ""
    remedy: str = ""

    def line(self) -> str:
        parts = [f"{self.status.value:<9} {self.name:<26} {self.found}"]
        parts += [f"expected: {self.expected}"] if self.expected else []
        parts += [f"remedy: {self.remedy}"] if self.remedy else []
        return " | ".join(parts)


@dataclass(frozen=True)
class CollectiveTime:
    """The measurement of one collective.

    ``axis``: "all" or the axis of the groups; ``bytes``: the size of a rank's input or output, the
    larger one; ``modelled``: the seconds according to ``tpu/links.py``, ``None`` if the slice is
    unknown.
    """

    kind: str
    axis: str
    groups: tuple[tuple[int, ...], ...]
    bytes: int
    seconds: float
    modelled: float | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks of a group; for a permute, whose groups are pairs, of the ring."""
        return len(self.groups) if self.kind == "collective-permute" else len(self.groups[0])

    @property
    def sent(self) -> int:
        """The bytes that a rank sends."""
        return wire_bytes(self.kind, self.bytes, self.ranks)


@dataclass(frozen=True)
class Rate:
    """The speed of one device: ``amount`` (bytes or operations) in ``seconds``.

    ``published``: the published speed for each second; ``None`` if there is none.
    """

    name: str
    unit: str  # "B" or "FLOP"
    amount: float
    seconds: float
    published: float | None = None

    @property
    def value(self) -> float:
        """The amount for each second."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class StepRun:
    """A measured training step, and its plan if there is one.

    ``hbm``: the peak bytes of the device in use; ``planned_hbm``: the bytes that the plan requires;
    ``None`` if unknown. ``host``: seconds of this process to trace the step.
    """

    name: str
    lane: str  # "xla_fsdp" or "in-tree"
    seconds: float
    host: float
    losses: tuple[float, ...]
    hbm: int | None = None
    planned: float | None = None
    planned_hbm: int | None = None


@dataclass(frozen=True)
class Machine:
    """The machine and software of a verification."""

    device: str  # its name in the runtime
    family: str  # a family of tpu/chips.py, or "cpu"
    ranks: int
    topology: str  # "" if it is unknown
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
