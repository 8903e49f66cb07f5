"""Default folders for results that can be computed again."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/xla_fsdp/name``; without the variable in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "xla_fsdp" / name
