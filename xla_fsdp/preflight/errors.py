"""The errors that end a preflight early."""


class UsageError(Exception):
    """The user must change the flags, the credentials or the name before any check can run."""


class ApiError(Exception):
    """The TPU API did not answer, or with an unexpected answer; reported as a failed check.

    Attributes:
        found, expected, remedy: as in :class:`~.checks.Check`.
        passing: whether the error may be temporary.
    """

    def __init__(self, found: str, expected: str, remedy: str, passing: bool = False) -> None:
        super().__init__(found)
        self.found, self.expected, self.remedy, self.passing = found, expected, remedy, passing
