"""Dotted names of modules, parameters and buffers."""

from __future__ import annotations


def dotted(path: str, name: str) -> str:
    """``name`` inside ``path``; either may be empty."""
    return f"{path}.{name}" if path and name else path or name
