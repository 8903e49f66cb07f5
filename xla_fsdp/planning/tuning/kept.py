"""The setting ``kept_blocks``: which units keep their full parameters until the backward."""

from __future__ import annotations

from typing import Any

# A number N: the first N blocks. A tuple: numbers of blocks, from 0; or names of units by size.
Kept = int | tuple[int | str, ...]


def is_kept(kept: Any) -> bool:
    """Whether ``kept`` is a valid value of the setting."""
    if not isinstance(kept, tuple):
        return _number(kept)
    alike = all(map(_number, kept)) or all(isinstance(one, str) and one for one in kept)
    return alike and len(set(kept)) == len(kept)


def by_name(kept: Kept) -> bool:
    """Whether ``kept`` has names of units, not numbers of blocks."""
    return isinstance(kept, tuple) and any(isinstance(one, str) for one in kept)


def numbers(kept: Kept) -> set[int]:
    """The numbers of the blocks in ``kept``."""
    if isinstance(kept, tuple):
        return {one for one in kept if isinstance(one, int)}
    return set(range(kept))


def keeps(kept: Kept, number: int, name: str = "") -> bool:
    """Whether block ``number``, or the unit called ``name``, keeps its parameters."""
    return name in kept if isinstance(kept, tuple) and by_name(kept) else number in numbers(kept)


def described(value: Any) -> str:
    """The value of a setting, as a caller writes it; consecutive numbers of blocks as a range."""
    if isinstance(value, str):
        return f'"{value}"'
    if not isinstance(value, tuple):
        return str(value)
    end = ",)" if len(value) == 1 else ")"
    if by_name(value):
        return f"({', '.join(map(described, value))}{end}"
    rows: list[list[int]] = []
    for number in sorted(numbers(value)):
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    spans = (str(row[0]) if len(row) == 1 else f"{row[0]} to {row[-1]}" for row in rows)
    return f"({', '.join(spans)}{end}"


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
