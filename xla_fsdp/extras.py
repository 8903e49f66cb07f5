"""Packages that only a part of this one needs, and what to say where they are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable


class MissingExtraError(ImportError):
    """A package that this part of xla_fsdp needs is not installed."""


def require_extra(extra: str, part: str, modules: Iterable[str]) -> None:
    """Raises MissingExtraError unless ``modules``, which ``extra`` installs, are there.

    ``part``: what needs them, the subject of the message.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{part} needs {', '.join(missing)}: pip install 'xla_fsdp[{extra}]' "
            f"(from a checkout: pip install -e '.[{extra}]')"
        )
