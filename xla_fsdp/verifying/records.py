"""What a verification knows, as plain data. All times are seconds, all sizes bytes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..tpu.traffic import wire_bytes


class Status(enum.Enum):
    """What became of a promise."""

    OK = "ok"
    DIFFERENT = "different"  # a figure is another than the one that a plan takes
    FAILED = "FAILED"  # what must hold does not
    SKIPPED = "skipped"  # could not be looked at; ``found`` says why


@dataclass(frozen=True)
class Finding:
    """One promise: ``name`` what of, ``promised`` and ``found`` as clauses, ``remedy`` or ""."""

    status: Status
    name: str
    found: str
    promised: str = ""
    remedy: str = ""

    def line(self) -> str:
        parts = [f"{self.status.value:<9} {self.name:<26} {self.found}"]
        parts += [f"promised: {self.promised}"] if self.promised else []
        parts += [f"remedy: {self.remedy}"] if self.remedy else []
        return " | ".join(parts)


@dataclass(frozen=True)
class CollectiveTime:
    """One collective as it was measured.

    ``axis``: "all" or what the groups run along; ``bytes``: the larger of what a rank puts in and
    gets out; ``modelled``: what ``tpu/links.py`` says, ``None`` where the slice is unknown.
    """

    kind: str
    axis: str
    groups: tuple[tuple[int, ...], ...]
    bytes: int
    seconds: float
    modelled: float | None = None

    @property
    def ranks(self) -> int:
        """In a group; a permute's groups are pairs, and its ring has as many."""
        return len(self.groups) if self.kind == "collective-permute" else len(self.groups[0])

    @property
    def sent(self) -> int:
        """Bytes that a rank sends."""
        return wire_bytes(self.kind, self.bytes, self.ranks)


@dataclass(frozen=True)
class Rate:
    """What one device attains: ``amount`` (bytes or operations) in ``seconds``.

    ``published``: a second, of one device; ``None`` where nothing is.
    """

    name: str
    unit: str  # "B" or "FLOP"
    amount: float
    seconds: float
    published: float | None = None

    @property
    def value(self) -> float:
        """A second."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class StepRun:
    """A training step, run, and planned where it could be.

    ``hbm``: most bytes of the device in use, ``planned_hbm`` what the plan requires; ``None`` where
    nobody says. ``host``: seconds of this process to trace it.
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
class Where:
    """What it was run on."""

    device: str  # what the runtime calls it
    family: str  # of tpu/chips.py, or "cpu"
    ranks: int
    topology: str  # "" where it is none we know
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
