"""The results of a verification as plain data. All times are seconds, all sizes bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tpu.links import wire_bytes


@dataclass(frozen=True)
class Job:
    """The job of a child process.

    ``notes``: the file for its results. ``cases``, ``sizes``: names of those to run; empty: all.
    ``until``: when measurements end, as ``time.time()``.
    """

    stages: tuple[str, ...]
    folder: str
    ckpt_dir: str
    until: float
    notes: str = ""
    cases: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    num_devices: int | None = None
    topology: str = ""

    def add(self, kind: str, value: Any) -> None:
        """Appends a result of this ``kind`` to the file."""
        with open(self.notes, "ab") as file:
            file.write(pickle.dumps((kind, value)))


def read_notes(folder: Path, kind: str) -> list[Any]:
    """The results of a ``kind`` in all files of ``folder``, in the order of writing."""
    found = []
    for path in sorted(folder.glob("*.notes")):
        with path.open("rb") as file:
            try:
                while True:
                    found.append(pickle.load(file))
            except (
                EOFError,
                pickle.UnpicklingError,
            ):  # the end, or half a result of a killed process
                pass
    return [value for each, value in found if each == kind]


@dataclass(frozen=True)
class CollectiveTime:
    """The measurement of one collective.

    ``axis``: "all" or the axis of the groups. ``bytes``: a rank's input or output, the larger one.
    ``modelled``: seconds according to ``tpu/links.py``, ``None`` if the slice is unknown.
    """

    kind: str
    axis: str
    groups: tuple[tuple[int, ...], ...]
    bytes: int
    seconds: float
    modelled: float | None = None

    @property
    def ranks(self) -> int:
        """Ranks of a group; for a permute, whose groups are pairs, of the ring."""
        return len(self.groups) if self.kind == "collective-permute" else len(self.groups[0])

    @property
    def sent(self) -> int:
        """The bytes that a rank sends."""
        return wire_bytes(self.kind, self.bytes, self.ranks)


@dataclass(frozen=True)
class Rate:
    """The speed of one device: ``amount`` (bytes or operations) in ``seconds``.

    ``published``: the published speed per second; ``None`` if there is none.
    """

    name: str
    unit: str  # "B" or "FLOP"
    amount: float
    seconds: float
    published: float | None = None

    @property
    def value(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True)
class StepRun:
    """A measured training step, and its plan if there is one; ``None`` where unknown.

    ``host``: seconds to trace the step. ``hbm``: the device's peak bytes in use; ``planned_hbm``:
    the bytes that the plan requires.
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
    device: str  # its name in the runtime
    family: str  # a family of tpu/chips.py, or "cpu"
    ranks: int
    topology: str  # "" if unknown
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
