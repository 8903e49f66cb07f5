"""Optional packages, and the errors if they are missing."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable
from importlib import metadata

# docs/reference/versions.md lists what was tested.
_OLDEST_TORCH_XLA = (2, 8)


class MissingExtraError(ImportError):
    """A package that this part of xla_fsdp needs is not installed."""


def require_extra(extra: str, part: str, modules: Iterable[str]) -> None:
    """Raises MissingExtraError unless ``modules`` of ``extra``, for ``part``, are installed."""
    missing = [name for name in modules if not _is_there(name)]
    if missing:
        raise MissingExtraError(
            f"{part} needs {', '.join(missing)}, which is not installed. Run pip install "
            f"'xla_fsdp[{extra}]' (from a checkout: pip install -e '.[{extra}]')"
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of packages, or "", and of "python"."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return {**versions, "python": platform.python_version()}


def require_torch_xla() -> None:
    """Raises ImportError if torch, torch_xla and this package do not match.

    Their own import error would only name a missing symbol. Does nothing without torch_xla.
    """
    try:
        xla, torch = metadata.version("torch_xla"), metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    remedy = (
        "pip install torch==2.9.0 torch_xla==2.9.0; checkpoints are read without torch_xla, by "
        "xla_fsdp.consolidate: docs/reference/versions.md"
    )
    built_for = _major_minor(xla)
    if _major_minor(torch) != built_for:
        raise ImportError(
            f"torch_xla {xla} is built for torch {built_for[0]}.{built_for[1]} and does not load "
            f"with torch {torch}, which is installed. To fix it: {remedy}"
        )
    if built_for < _OLDEST_TORCH_XLA:
        raise ImportError(
            f"torch_xla {xla} is too old; xla_fsdp trains with 2.9 and 2.8. To fix it: {remedy}"
        )


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
