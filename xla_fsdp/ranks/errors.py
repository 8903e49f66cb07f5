"""What a launch raises: all of it on CPU ranks, RankError anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable


class RankError(RuntimeError):
    """A rank raised. ``__cause__`` is its exception.

    As text it has the rank's traceback, unless ``__cause__`` has: Python prints that one itself.

    Attributes:
        rank: the number of the first rank that raised, or ``None`` if no single rank is to blame.
        traceback: that rank's traceback as text, or ``""``.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __str__(self) -> str:
        printed = self.__cause__ is not None and self.__cause__.__traceback__ is not None
        shown = "" if printed or not self.traceback else f"\n\n{self.traceback}"
        return super().__str__() + shown

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int | None, str]]:
        return type(self), (self.args[0], self.rank, self.traceback)


class CollectiveMismatchError(RankError):
    """Ranks wait for each other at different places; the message says where each one is."""


class RankTimeoutError(RankError):
    """A rank kept others waiting for longer than ``timeout``; the message says where it is."""


class Preempted(SystemExit):
    """The machine is being taken away, and what was trained is saved: start the same command again.

    Raised on every rank, and by ``launch``, so that the process ends with this exit code unless
    somebody catches it.

    Attributes:
        reason: what was heard, for example ``"SIGTERM"``.
    """

    #: ``EX_TEMPFAIL`` of sysexits.h: "the user is invited to retry".
    EXIT_CODE = 75

    def __init__(self, reason: str = "") -> None:
        super().__init__(self.EXIT_CODE)
        self.reason = reason

    def __reduce__(self) -> tuple[type[Preempted], tuple[str]]:
        return type(self), (self.reason,)


class RankStopped(BaseException):
    """Unwinds a rank because another failed. Not an ``Exception``: user code must not eat it."""


def portable(
    error: BaseException | None, dumps: Callable[[BaseException], bytes] = pickle.dumps
) -> bytes | None:
    """``error`` pickled, or ``None`` if it does not survive that, whatever its class does there."""
    if error is None:
        return None
    try:
        data = dumps(error)
        pickle.loads(data)
    except BaseException:  # this is said of an error already: no other may take its place
        return None
    return data
