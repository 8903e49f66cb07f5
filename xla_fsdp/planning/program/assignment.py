"""Parses XLA's buffer assignment (``*-buffer-assignment.txt``).

All temporaries are in one *allocation*, in which *values* have offsets; values that are not live at
the same time share bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    values: Sequence[Value]


@dataclass(frozen=True)
class Value:
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

    def held(self, category: str) -> int:
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
    allocations = tuple(_allocations(head, ranges, len(sequence) - 1))
    lines = filter(None, map(_ALLOCATION.match, head.splitlines()))
    on_host = sum(int(line[2]) for line in lines if _color(line[3]) == HOST)
    return Assignment(allocations, tuple(sequence), on_host)


def _allocations(
    text: str, ranges: Mapping[tuple[str, str], tuple[int, int]], last: int
) -> Iterator[Allocation]:
    values: list[Value] | None = None
    for line in text.splitlines():
        if begin := _ALLOCATION.match(line):
            kind, values = _kind(int(begin[2]), begin[3]), None
            if kind is not None:
                values = []
                yield Allocation(*kind, values)
        elif values is not None:
            value = _VALUE.match(line)
            if value:
                name, index, size, offset, shape = value.groups()
                born, dies = ranges.get((name, index or "{}"), (0, last))
                values.append(Value(name, int(size), int(offset), shape, born, dies))
            elif not line.startswith(" "):
                break


def _kind(size: int, said: str) -> tuple[int, str, int | None] | None:
    """Size, category and parameter number; ``None`` if the allocation is not in HBM."""
    if _color(said) != HBM or "thread-local" in said:
        return None
    parameter = _PARAMETER.search(said)
    if parameter:
        return size, "argument", int(parameter[1])
    if "constant" in said:
        return size, "constant", None
    is_output = "output shape" in said or "maybe-live-out" in said
    return size, "output" if is_output else "temporary", None


def _color(said: str) -> int:
    color = _COLOR.search(said)
    return int(color[1]) if color else HBM


def without_overlap(values: Sequence[Value]) -> list[Value]:
    """Values cut so that no byte counts twice: XLA's ranges of in-place updates overlap."""
    by_bytes: dict[tuple[int, int], list[Value]] = defaultdict(list)
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
