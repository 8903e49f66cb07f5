"""How long ranks may make no progress, and what happens then."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from dataclasses import dataclass

#: ``off``, seconds that replace launch's ``timeout``, ``end``, or both: ``900,end``.
VARIABLE = "XLA_FSDP_WATCHDOG"
# The factor for ranks that compile or compute, and before the first step.
_TIMES_AT_WORK = 4
_SECONDS_BETWEEN_BEATS, _BEATS_IN_TIMEOUT = 5.0, 20
_BEATS_TO_ANSWER, _SECONDS_TO_ANSWER = 3, 2.0  # whichever is longer


@dataclass(frozen=True)
class WatchSettings:
    """``timeout``: allowed seconds without progress; ``end``: whether ranks are ended then."""

    timeout: float
    end: bool

    @property
    def beat(self) -> float:
        """Seconds between two measurements."""
        return min(_SECONDS_BETWEEN_BEATS, self.timeout / _BEATS_IN_TIMEOUT)

    @property
    def to_answer(self) -> float:
        return max(_BEATS_TO_ANSWER * self.beat, _SECONDS_TO_ANSWER)

    def patience(self, steps: int, work: bool) -> float:
        """Seconds without progress until a report; ``steps``: those of the furthest rank."""
        return self.timeout * (_TIMES_AT_WORK if work or not steps else 1)


def watch_settings(timeout: float) -> WatchSettings | None:
    """From the environment, or else ``timeout`` of launch; ``None`` if off. Raises ValueError."""
    given = os.environ.get(VARIABLE, "")
    text = given.replace(" ", "").lower()
    if text == "off":
        return None
    end = text == "end" or text.endswith(",end")
    seconds = text.removesuffix("end").removesuffix(",") if end else text
    with contextlib.suppress(ValueError):
        value = float(seconds) if seconds else timeout
        if 0 < value < math.inf or not seconds:
            return WatchSettings(value, end)
    raise ValueError(
        f"{VARIABLE}={given!r}: allowed are off, a positive number of seconds, end, or both, as in "
        "900,end"
    )


def log_line(text: str) -> None:
    """In one write: ``print`` may make two, which mix with other ranks'."""
    sys.stderr.write(f"xla_fsdp: {text}\n")
    sys.stderr.flush()
