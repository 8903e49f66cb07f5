"""Packages that only a part of this one needs, and what to say where they are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib import metadata

# The first one that training works with; docs/reference/versions.md says what was tried.
_OLDEST_TORCH_XLA = (2, 8)


class MissingExtraError(ImportError):
    """A package that this part of xla_fsdp needs is not installed."""


def require_extra(extra: str, part: str, modules: Iterable[str]) -> None:
    """Raises MissingExtraError unless ``modules``, which ``extra`` installs, are there.

    ``part``: what needs them, the subject of the message.
    """
    missing = [name for name in modules if not _is_there(name)]
    if missing:
        raise MissingExtraError(
            f"{part} needs {', '.join(missing)}: pip install 'xla_fsdp[{extra}]' "
            f"(from a checkout: pip install -e '.[{extra}]')"
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it is in
        return False


def require_torch_xla() -> None:
    """Looks at torch and torch_xla before they are imported, which may end in a symbol's name.

    Without torch_xla nothing is said: importing it says so.

    Raises:
        ImportError: their versions do not work with each other, or not with this package.
    """
    try:
        xla, torch = metadata.version("torch_xla"), metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    remedy = (
        "pip install torch==2.9.0 torch_xla==2.9.0; checkpoints are read without torch_xla, by "
        "xla_fsdp.consolidate: docs/reference/versions.md"
    )
    built_for = _first_two(xla)
    if _first_two(torch) != built_for:
        raise ImportError(
            f"torch_xla {xla} is built for torch {built_for[0]}.{built_for[1]} and does not load "
            f"with torch {torch}, which is installed: {remedy}"
        )
    if built_for < _OLDEST_TORCH_XLA:
        raise ImportError(
            f"torch_xla {xla} is too old: xla_fsdp trains with 2.9, and with 2.8: {remedy}"
        )


def _first_two(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
