"""One line on the terminal with the current work and its seconds so far."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO

_WORTH_A_LINE = 5.0  # seconds


class Progress:
    """Rewrites one line on a terminal; elsewhere prints a line at the start and one at the end.

    ``stream=None`` prints nothing.
    """

    def __init__(self, stream: TextIO | None = sys.stderr) -> None:
        self._stream = stream
        self._shown = ""

    def update(self, what: str, seconds: float) -> None:
        if self._stream is None:
            return
        if self._stream.isatty():
            self._write(f"\r\033[K{what} … {seconds:.0f} s", "")
        elif self._shown != what:
            self._write(f"{what} …", "\n")
        self._shown = what

    @contextlib.contextmanager
    def while_doing(self, what: str) -> Iterator[None]:
        """Names what this thread does itself, and so cannot count the seconds of."""
        began = time.monotonic()
        if self._stream is not None and self._stream.isatty():
            self._write(f"\r\033[K{what} …", "")
        yield
        if self._stream is not None and self._stream.isatty():
            self._write("\r\033[K", "")
        elif time.monotonic() - began > _WORTH_A_LINE:
            self.done(what, time.monotonic() - began)

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._stream is not None:
            start = "\r\033[K" if self._stream.isatty() else ""
            self._write(f"{start}{text}", "\n")
        self._shown = ""

    def done(self, what: str, seconds: float) -> None:
        self.say(f"{what}: {seconds:.0f} s")

    def _write(self, text: str, end: str) -> None:
        print(text, end=end, file=self._stream, flush=True)
