"""The exceptions of a launch."""

from __future__ import annotations

import pickle
from collections.abc import Callable


class RankError(RuntimeError):
    """A rank raised. ``__cause__`` is its exception.

    Attributes:
        rank: the number of the first rank that raised, or ``None`` if no single rank is the cause.
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
    """Ranks wait for each other at different places; the message lists the place of each rank."""


class RankTimeoutError(RankError):
    """A rank kept others waiting for longer than ``timeout``; the message shows its place."""


class Preempted(SystemExit):
    """The machine is being preempted and a checkpoint is saved: start the same command again.

    Every rank raises it, and so does ``launch``. Unless it is caught, the process ends with exit
    code 75.

    Attributes:
        reason: the notice of preemption, for example ``"SIGTERM"``.
    """

    #: ``EX_TEMPFAIL`` of sysexits.h: "the user is invited to retry".
    EXIT_CODE = 75

    def __init__(self, reason: str = "") -> None:
        super().__init__(self.EXIT_CODE)
        self.reason = reason

    def __reduce__(self) -> tuple[type[Preempted], tuple[str]]:
        return type(self), (self.reason,)


class RankStopped(BaseException):
    """Ends a rank because another failed; ``except Exception`` does not catch it."""


def described(error: BaseException) -> str:
    """The type and the message of ``error``, also if its ``__str__`` raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except (Exception, RankStopped):
        return f"{name} (its message raises an exception)"


def portable(
    error: BaseException | None, dumps: Callable[[BaseException], bytes] = pickle.dumps
) -> bytes | None:
    """Pickles ``error``; ``None`` if pickling or unpickling fails."""
    if error is None:
        return None
    try:
        data = dumps(error)
        pickle.loads(data)
    except BaseException:  # must not replace the reported error
        return None
    return data


def loads_or_none(data: bytes | None) -> BaseException | None:
    """The exception that :func:`portable` pickled; ``None`` if its class is unknown here."""
    try:
        return None if data is None else pickle.loads(data)
    except Exception:
        return None
