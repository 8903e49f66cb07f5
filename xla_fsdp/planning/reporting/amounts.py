"""How reports write figures and long names."""

from __future__ import annotations

GIB, MIB, MB = 2**30, 2**20, 10**6
MB_MEANS = "10^6 bytes"  # as bandwidths are rated; MiB and GiB are binary
UNKNOWN = "unknown"


def figure(value: float | None, digits: int = 0, unit: str = "") -> str:
    """The figure with its unit; ``None`` is unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:,.{digits}f} {unit}".rstrip()


def percent(part: float | None, digits: int = 0) -> str:
    """A share as a percentage."""
    return figure(None if part is None else 100 * part, digits, "%")


def milliseconds(seconds: float | None, digits: int = 2) -> str:
    return figure(None if seconds is None else 1e3 * seconds, digits, "ms")


def share(part: float, whole: float) -> float:
    """``part / whole``, 0 where there is nothing."""
    return part / whole if whole else 0.0


def short(text: str, most: int) -> str:
    """``text`` in at most that many characters, cut in the middle."""
    if len(text) <= most:
        return text
    return text[: most // 2 - 1] + "…" + text[len(text) - (most - most // 2) :]
