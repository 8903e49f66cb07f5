"""The results of a verification as plain data. All times are seconds, all sizes bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tpu.links import wire_bytes


@dataclass(frozen=True)
class Job:
    """``until``: when measurements end (``time.time()``); empty ``cases`` or ``sizes``: all."""

    stages: tuple[str, ...]
    folder: str
    ckpt_dir: str
    until: float
    notes: str = ""
    cases: Sequence[str] = ()
    sizes: Sequence[str] = ()
    num_devices: int | None = None
    topology: str = ""

    def add(self, kind: str, value: Any) -> None:
        with open(self.notes, "ab") as file:
            file.write(pickle.dumps((kind, value)))


def read_notes(folder: Path, kind: str) -> list[Any]:
    """Reads all files of ``folder``, in the order of writing."""
    found = []
    for path in sorted(folder.glob("*.notes")):
        with path.open("rb") as file:
            try:
                while True:
                    found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # or half a result of a killed process
                pass
    return [value for each, value in found if each == kind]


@dataclass(frozen=True)
class CollectiveTime:
    """``bytes``: a rank's input or output, the larger one; ``modelled``: by ``tpu/links.py``."""

    kind: str
    axis: str
    groups: tuple[tuple[int, ...], ...]
    bytes: int
    seconds: float
    modelled: float | None = None

    @property
    def ranks(self) -> int:
        """For a permute, whose groups are pairs, the ranks of the ring."""
        return len(self.groups) if self.kind == "collective-permute" else len(self.groups[0])

    @property
    def sent(self) -> int:
        return wire_bytes(self.kind, self.bytes, self.ranks)


@dataclass(frozen=True)
class Rate:
    """``amount`` (bytes or operations) in ``seconds``; ``published``: per second."""

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
    """``host``: seconds to trace the step; ``hbm``: peak bytes in use; ``None`` where unknown."""

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
    device: str  # in the runtime
    family: str  # a family of tpu/chips.py, or "cpu"
    ranks: int
    topology: str
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
