"""Which units keep their full parameters for the backward, as a setting says it."""

from __future__ import annotations

from typing import Any

# The first so many blocks; numbers of blocks, from 0 on; or dotted names of units by size.
Kept = int | tuple[int | str, ...]


def is_kept(kept: Any) -> bool:
    """Whether ``kept`` is one of these."""
    if not isinstance(kept, tuple):
        return _number(kept)
    alike = all(map(_number, kept)) or all(isinstance(one, str) and one for one in kept)
    return alike and len(set(kept)) == len(kept)


def by_name(kept: Kept) -> bool:
    """Whether it names units by size."""
    return isinstance(kept, tuple) and any(isinstance(one, str) for one in kept)


def numbers(kept: Kept) -> set[int]:
    """Of blocks."""
    if isinstance(kept, tuple):
        return {one for one in kept if isinstance(one, int)}
    return set(range(kept))


def keeps(kept: Kept, number: int, name: str = "") -> bool:
    """Whether block ``number``, or the unit called ``name``, keeps its parameters."""
    return name in kept if isinstance(kept, tuple) and by_name(kept) else number in numbers(kept)


def described(kept: Kept) -> str:
    """In a few words; numbers in a row as a range."""
    if not isinstance(kept, tuple):
        return str(kept)
    if by_name(kept):
        return ", ".join(map(str, kept))
    rows: list[list[int]] = []
    for number in sorted(numbers(kept)):
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    spans = (str(row[0]) if len(row) == 1 else f"{row[0]} to {row[-1]}" for row in rows)
    return f"blocks {', '.join(spans)}"


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
