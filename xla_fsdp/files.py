"""Default folders for results that can be computed again, and the check of JSON files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def default_cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/xla_fsdp/name``; without the variable in ``~/.cache``.

    Raises FileNotFoundError for a user without a home folder.
    """
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):
        raise FileNotFoundError(
            f"the default folder for {name} cannot be found, because this user has no home folder:"
            " set HOME or XDG_CACHE_HOME to a folder, or pass another one"
        )
    return Path(base) / "xla_fsdp" / name


def parse_record(
    text: str | bytes,
    source: str,
    format: str,
    version: int,
    expected: str,
    error: type[ValueError] = ValueError,
) -> dict[str, Any]:
    """The JSON object ``text``. Raises ``error`` if it is another, naming ``expected``."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{source} is not JSON ({problem}): {expected}") from problem
    if not isinstance(record, dict) or record.get("format") != format:
        raise error(f"{source} is some other JSON: {expected}")
    if record.get("version") != version:
        found = record.get("version")
        raise error(f"{source} has version {found!r}, allowed is {version}: {expected}")
    return record
