"""How long ranks may stand still, and what happens then."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from dataclasses import dataclass

#: ``off``, or seconds instead of launch's ``timeout``, or ``end``, or these two: ``900,end``.
VARIABLE = "XLA_FSDP_WATCHDOG"
# Of the timeout, while a process compiles or computes, and before there was a first step.
_TIMES_AT_WORK = 4
_SECONDS_BETWEEN_BEATS, _BEATS_IN_TIMEOUT = 5.0, 20
_BEATS_TO_ANSWER, _SECONDS_TO_ANSWER = 3, 2.0  # whichever is longer


@dataclass(frozen=True)
class WatchSettings:
    """``timeout``: seconds without any progress. ``end``: whether ranks are ended then."""

    timeout: float
    end: bool

    @property
    def beat(self) -> float:
        """Seconds from one look to the next."""
        return min(_SECONDS_BETWEEN_BEATS, self.timeout / _BEATS_IN_TIMEOUT)

    @property
    def to_answer(self) -> float:
        """Seconds that a rank has for a sign of life."""
        return max(_BEATS_TO_ANSWER * self.beat, _SECONDS_TO_ANSWER)

    def patience(self, steps: int, work: bool) -> float:
        """Seconds without progress that are no reason to say anything, after so many steps of the
        furthest rank, and if any is at work."""
        return self.timeout * (_TIMES_AT_WORK if work or not steps else 1)


def settings(timeout: float) -> WatchSettings | None:
    """What the user asked for: ``timeout`` of launch, unless the environment says otherwise; and
    ``None`` for nothing.

    Raises:
        ValueError: the variable has another form.
    """
    given = os.environ.get(VARIABLE, "")
    said = given.replace(" ", "").lower()
    if said == "off":
        return None
    end = said == "end" or said.endswith(",end")
    seconds = said.removesuffix("end").removesuffix(",") if end else said
    with contextlib.suppress(ValueError):
        value = float(seconds) if seconds else timeout
        if 0 < value < math.inf or not seconds:
            return WatchSettings(value, end)
    raise ValueError(
        f"{VARIABLE}={given!r}: allowed are off, a positive number of seconds, end, or both, as in "
        "900,end"
    )


def say(text: str) -> None:
    """To whoever reads what the job prints.

    One write: with ``PYTHONUNBUFFERED`` ``print`` makes two, and another rank's lands between.
    """
    sys.stderr.write(f"xla_fsdp: {text}\n")
    sys.stderr.flush()
