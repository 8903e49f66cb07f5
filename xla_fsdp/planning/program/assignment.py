"""Parses XLA's buffer assignment (``*-buffer-assignment.txt``).

All temporaries are in one *allocation*, in which *values* have offsets; values that are not live at
the same time share bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .hlo import HBM, HOST

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*)$")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_PLACE = re.compile(r"^    (\d+):(\S+)$")
_RANGE = re.compile(r"^    (.+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_COLOR = re.compile(r", color (\d+)")
_PARAMETER = re.compile(r", parameter (\d+)")
LIVE_RANGES = "\nHloLiveRange"


@dataclass(frozen=True)
class Allocation:
    """A piece of HBM; ``category`` is "argument", "output", "temporary" or "constant"."""

    bytes: int
    category: str
    parameter: int | None
    values: Sequence[AllocatedValue]


@dataclass(frozen=True)
class AllocatedValue:
    """The result of one instruction, live from ``born`` to ``dies`` inclusive."""

    name: str
    bytes: int
    offset: int
    shape: str
    born: int
    dies: int


@dataclass(frozen=True)
class Assignment:
    allocations: tuple[Allocation, ...]
    sequence: tuple[str, ...]
    on_host: int = 0  # bytes of temporaries

    def bytes_of(self, category: str) -> int:
        return sum(a.bytes for a in self.allocations if a.category == category)


def read_assignment(text: str) -> Assignment:
    """Raises ValueError if ``text`` is no buffer assignment, or has no live ranges."""
    if not text.startswith("BufferAssignment:"):
        raise ValueError(f"not a buffer assignment of XLA: it begins with {text[:40]!r}")
    head, found, tail = text.partition(LIVE_RANGES)
    if not found:
        raise ValueError("the buffer assignment has no section HloLiveRange")
    sequence: list[str] = []
    ranges: dict[tuple[str, str], tuple[int, int]] = {}
    for line in tail.splitlines():
        place = _PLACE.match(line)
        if place:
            sequence.append(place[2])
            continue
        live = _RANGE.match(line)
        if live:
            ranges[live[1], live[2]] = int(live[3]), int(live[4])
        elif line.startswith("  Live ranges at"):
            break
    last = len(sequence) - 1
    allocations: list[Allocation] = []
    on_host = 0
    values: list[AllocatedValue] | None = None
    for line in head.splitlines():
        if begin := _ALLOCATION.match(line):
            size, said, values = int(begin[2]), begin[3], None
            color = _COLOR.search(said)
            space = int(color[1]) if color else HBM
            on_host += size * (space == HOST)
            if space == HBM and "thread-local" not in said:
                values = []
                allocations.append(Allocation(size, *_category(said), values))
        elif values is not None and (value := _VALUE.match(line)):
            name, index, length, offset, shape = value.groups()
            born, dies = ranges.get((name, index or "{}"), (0, last))
            values.append(AllocatedValue(name, int(length), int(offset), shape, born, dies))
    return Assignment(tuple(allocations), tuple(sequence), on_host)


def _category(said: str) -> tuple[str, int | None]:
    """Category and parameter number."""
    parameter = _PARAMETER.search(said)
    if parameter:
        return "argument", int(parameter[1])
    if "constant" in said:
        return "constant", None
    is_output = "output shape" in said or "maybe-live-out" in said
    return "output" if is_output else "temporary", None


def without_overlap(values: Sequence[AllocatedValue]) -> list[AllocatedValue]:
    """Values cut so that no byte counts twice: XLA's ranges of in-place updates overlap."""
    by_bytes: dict[tuple[int, int], list[AllocatedValue]] = defaultdict(list)
    for value in values:
        by_bytes[value.offset, value.bytes].append(value)
    result = []
    for same in by_bytes.values():
        same.sort(key=lambda v: (v.born, v.dies))
        for value, following in zip(same, [*same[1:], None], strict=True):
            dies = value.dies if following is None else min(value.dies, following.born - 1)
            if dies >= value.born:
                result.append(replace(value, dies=dies))
    return result
