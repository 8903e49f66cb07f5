"""How far it is, in bytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

# Called with the number of bytes that were done since the last call.
Progress = AbstractContextManager[Callable[[int], None]]


@contextlib.contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows nothing."""
    yield lambda count: None


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; nothing if there is nothing to do."""
    try:
        from tqdm import tqdm
    except ImportError:  # a machine with torch only
        tqdm = None
    if not total or tqdm is None:
        yield lambda count: None
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr) as shown:
        yield shown.update
