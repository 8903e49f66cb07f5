"""Shows the current work on the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO

_WORTH_A_LINE = 5.0  # seconds
_OFTEN = 60.0  # seconds


class Progress:
    """Rewrites one line on a terminal; elsewhere prints a line at the start and one at the end.

    ``stream=None`` prints nothing. ``budget``: the most compilations of a search.
    """

    def __init__(self, stream: TextIO | None = sys.stderr, budget: int = 0) -> None:
        self._stream, self._budget, self._began = stream, budget, time.monotonic()
        self._shown, self._said = "", 0.0
        self._seconds: list[float] = []

    def update(self, what: str, seconds: float) -> None:
        if self._stream is None:
            return
        text = f"{what}, {self._status(seconds)}" if self._budget else what
        if self._stream.isatty():
            self._write(f"\r\033[K{text} … {seconds:.0f} s", "")
        elif self._shown != what or self._budget and seconds - self._said >= _OFTEN:
            self._write(f"{text} …", "\n")
            self._said = seconds
        self._shown = what

    def _status(self, seconds: float) -> str:
        done, so_far = len(self._seconds), _minutes(time.monotonic() - self._began)
        status = f"{done + 1} of at most {self._budget}; {so_far} so far"
        if done:
            mean = sum(self._seconds) / done
            left = max((self._budget - done) * mean - seconds, 0.0)
            status += f", at most about {_minutes(left)} remain"
        return status

    @contextlib.contextmanager
    def while_compiling(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds.append(time.monotonic() - began)

    @contextlib.contextmanager
    def while_doing(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        if self._stream is not None and self._stream.isatty():
            self._write(f"\r\033[K{what} …", "")
        yield
        if self._stream is not None and self._stream.isatty():
            self._write("\r\033[K", "")
        elif time.monotonic() - began > _WORTH_A_LINE:
            self.done(what, time.monotonic() - began)

    def say(self, text: str) -> None:
        if self._stream is not None:
            start = "\r\033[K" if self._stream.isatty() else ""
            self._write(f"{start}{text}", "\n")
        self._shown = ""

    def done(self, what: str, seconds: float) -> None:
        self.say(f"{what}: {seconds:.0f} s")

    def _write(self, text: str, end: str) -> None:
        print(text, end=end, file=self._stream, flush=True)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min"
