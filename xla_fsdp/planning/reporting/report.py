"""The report on one compiled step: all its figures. Whoever holds one needs no other module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..records import CompilerMemory, Schedule, Timing
from . import storage
from .amounts import GIB, MIB

if TYPE_CHECKING:
    from .compare import Comparison


@dataclass(frozen=True, repr=False)
class Report:
    """What a compiled step needs on a slice. All bytes are of one device and one step.

    Raises:
        ValueError: no devices, or no memory.
    """

    topology: str  # as the user named it
    chip: str
    devices: int
    hbm_capacity: int  # usable bytes a device
    hbm_source: str
    memory: CompilerMemory
    schedule: Schedule
    timing: Timing
    bound_wire_bytes: int | None  # of ZeRO; None where it is not known
    bound_label: str
    link_model: str  # one sentence: what the interconnect model assumes, and whence
    compile_seconds: float
    program_bytes: int
    ranks_traced: tuple[int, ...]
    executables: int  # distinct programs among them
    from_cache: bool = False
    title: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refusal: str = ""  # the compiler's message, if the step did not fit while it compiled

    def __post_init__(self) -> None:
        for name in ("devices", "hbm_capacity"):
            if getattr(self, name) < 1:
                message = f"{name} is {getattr(self, name)!r}: a report needs at least 1 of it"
                raise ValueError(message)

    @property
    def fits(self) -> bool:
        """Whether the step can be loaded and run."""
        return not self.refusal and self.memory.required <= self.hbm_capacity

    @property
    def headroom(self) -> float:
        """The share of HBM that stays free; below 0 where the step does not fit."""
        return 1 - self.memory.required / self.hbm_capacity

    @property
    def sized(self) -> bool:
        """Whether it is known what the step needs: not if the compiler gave up early."""
        return self.memory.required > 0 or not self.refusal

    @property
    def placed(self) -> bool:
        """Whether the compiler got as far as a schedule."""
        return self.schedule.length > 0

    @property
    def timed(self) -> bool:
        """Whether the compiler estimated the compute, as it does for steps that fit."""
        return self.timing.compute > 0

    @property
    def wire_bytes(self) -> int:
        """What a device sends in a step, loops counted as often as they run."""
        return sum(c.wire_bytes * c.times for c in self.schedule.collectives)

    @property
    def wire_ratio(self) -> float | None:
        """``wire_bytes`` over the bound; None where one of them is unknown."""
        if not self.bound_wire_bytes or not self.placed:
            return None
        return self.wire_bytes / self.bound_wire_bytes

    @property
    def verdict(self) -> str:
        """One line: whether it fits, and how well."""
        of = f"of {self.hbm_capacity / GIB:.1f} GiB a device on {self.topology}"
        required = f"{self.memory.required / GIB:.1f}"
        if self.memory.required < GIB / 10:
            required = f"{self.memory.required / MIB:.1f} MiB"
        if self.fits:
            return f"FITS: {required} {of} ({100 * self.headroom:.0f} % headroom)"
        missing = (self.memory.required - self.hbm_capacity) / GIB
        if missing <= 0:
            return f"DOES NOT FIT: {self.topology} has {self.hbm_capacity / GIB:.1f} GiB a device"
        return f"DOES NOT FIT: {required} {of} ({missing:.2f} GiB too much)"

    def __repr__(self) -> str:
        return f"<Report {self.title or 'step'}: {self.verdict}>"

    def __str__(self) -> str:
        from .text import text

        return text(self)

    def to_json(self) -> str:
        """The report as JSON, in full; ``from_json`` reads it."""
        return storage.encode(self)

    @classmethod
    def from_json(cls, text: str, source: str = "this text") -> Report:
        """The report that ``to_json`` wrote; sequences come back as tuples.

        Raises:
            ValueError: the text is something else. ``source`` says in the message where it is from.
        """
        return storage.decode(cls, text, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report, with the schedule, as JSON. The file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        storage.write(storage.target(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a report.
        """
        return cls.from_json(storage.read(path), str(path))

    def compare(self, other: Report) -> Comparison:
        """This report side by side with another; ratios are this one over the other.

        Raises:
            TypeError: ``other`` is no report.
        """
        from .compare import compare

        return compare(self, other)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw HBM over the schedule, and the timeline of the step.

        ``.png`` is a picture (needs matplotlib), ``.html`` one page that needs nothing else, with
        figures to hover over and the tables as well.

        Raises:
            ValueError: another suffix.
            FileNotFoundError: there is no such folder.
            ImportError: a PNG without matplotlib.
        """
        target = storage.target(path)
        if target.suffix.lower() == ".png":
            from .pictures import picture

            storage.write(target, picture(self))
        elif target.suffix.lower() == ".html":
            from .page import page

            storage.write(target, page(self).encode())
        else:
            message = f"cannot plot to {str(path)!r}: allowed are .png and .html; rename the file"
            raise ValueError(message)
