"""Parts of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

# From the name and the value of an argument to the value to store; may raise.
Check = Callable[[str, Any], Any]


def must_be(
    allowed: str,
    holds: Callable[[Any], bool],
    error: type[Exception] = TypeError,
    fix: str = "Pass one of these, or leave it out",
) -> Check:
    """A check that raises ``error`` with the name, the value, ``allowed`` and ``fix``."""

    def check(name: str, value: Any) -> Any:
        if not holds(value):
            raise error(f"{name} must be {allowed}, got {value!r}. {fix}")
        return value

    return check


flag = must_be("True or False", lambda value: isinstance(value, bool))


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def to_one_line(said: object, most: int = 300) -> str:
    """The message of an exception (or else its type) or of a program, on one printable line."""
    words = " ".join(str(said).split())
    if not words and isinstance(said, BaseException):
        return type(said).__name__
    words = printable(words)
    return words if len(words) <= most else words[:most] + "..."


def first_line(said: object, most: int = 300) -> str:
    """:func:`to_one_line` of the first line: a C++ stack, or advice, follows after it."""
    return to_one_line(str(said).strip().partition("\n")[0] or said, most)


def join_some(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """``a, b and 3 more``."""
    shown = between.join(texts[:most])
    left = len(texts) - most
    return f"{shown}{between.rstrip(', ')} and {left} more" if left > 0 else shown


def runs(what: str, numbers: Iterable[int]) -> str:
    """For 0, 1, 2 and 5: ``ranks 0-2, 5``; ``what`` is the singular."""
    ordered, found = sorted(numbers), list[list[int]]()
    for number in ordered:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)
    return f"{what}{'s' if len(ordered) > 1 else ''} {text}"
