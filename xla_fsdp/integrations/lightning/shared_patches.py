"""What Lightning changes in torch for a while, of which several ranks may be in at once.

Inside ``_replace_dunder_methods`` a class's methods note what they are called with, so that a
loader can be built once more with another sampler. It puts them back at its end, and one that
entered meanwhile would put back what it has found: the change of the first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any


class Shared:
    """A context that the first enters, the last leaves, and all in between share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[Any, tuple[int, ExitStack]] = {}

    @contextlib.contextmanager
    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        key = (*args, *sorted(kwargs.items()))
        with self._lock:
            count, stack = self._inside.get(key) or (0, ExitStack())
            if not count:
                stack.enter_context(original(*args, **kwargs))
            self._inside[key] = count + 1, stack
        try:
            yield
        finally:
            with self._lock:
                count, stack = self._inside.pop(key)
                if count > 1:
                    self._inside[key] = count - 1, stack
                else:
                    stack.close()
