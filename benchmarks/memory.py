"""Measure peak memory while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Peak:
    """The largest value of ``look()``, called every ``seconds`` while this context is open."""

    def __init__(self, look: Callable[[], int], seconds: float) -> None:
        self.value = 0
        self._look, self._seconds = look, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._seconds):
            self.value = max(self.value, self._look())
