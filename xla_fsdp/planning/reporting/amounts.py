"""Format figures for reports, and group modules into units."""

from __future__ import annotations

from collections.abc import Iterable

GIB, MIB, GB, MB = 2**30, 2**20, 10**9, 10**6
MB_MEANS = "10^6 bytes"  # the unit of bandwidths; MiB and GiB are binary
UNKNOWN = "unknown"


def figure(value: float | None, digits: int = 0, unit: str = "") -> str:
    """The figure with its unit; "unknown" for ``None``."""
    if value is None:
        return UNKNOWN
    return f"{value:,.{digits}f} {unit}".rstrip()


def percent(part: float | None, digits: int = 0) -> str:
    """A share as a percentage."""
    return figure(None if part is None else 100 * part, digits, "%")


def milliseconds(seconds: float | None, digits: int = 2) -> str:
    return figure(None if seconds is None else 1e3 * seconds, digits, "ms")


def share(part: float, whole: float) -> float:
    """``part / whole``; 0 if ``whole`` is 0."""
    return part / whole if whole else 0.0


def short(text: str, most: int) -> str:
    """``text``, shortened in the middle to at most ``most`` characters."""
    if len(text) <= most:
        return text
    return text[: most // 2 - 1] + "…" + text[len(text) - (most - most // 2) :]


def units(modules: Iterable[str]) -> dict[str, str]:
    """The top-level unit of every module, by which reports group their figures.

    A unit is the shortest beginning of the path that is not a parent of numbered blocks.

    ``blocks.3.attn.qkv`` and ``blocks.3.norm`` belong to ``blocks.3``, ``embed.proj`` to ``embed``,
    and next to ``model.layers.0.mlp``, ``model.norm`` is ``model.norm`` and not ``model``.
    """
    paths = {m: [c for c in m.split(".") if c and not c.startswith("_")] for m in set(modules)}
    holders: set[tuple[str, ...]] = set()
    for path in paths.values():
        number = next((i for i, part in enumerate(path) if part.isdigit()), 0)
        holders.update(tuple(path[: i + 1]) for i in range(number))
    found = {}
    for module, path in paths.items():
        depth = 1
        while depth < len(path) and tuple(path[:depth]) in holders:
            depth += 1
        found[module] = ".".join(path[:depth])
    return found
