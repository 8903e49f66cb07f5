"""What ends a preflight early."""


class UsageError(Exception):
    """Nothing can be checked before the user changes something: flags, credentials, the name."""


class ApiError(Exception):
    """The TPU API did not answer as it should; a failed check.

    Attributes:
        found, expected, remedy: as in :class:`~.checks.Check`.
        passing: whether asking again may help.
    """

    def __init__(self, found: str, expected: str, remedy: str, passing: bool = False) -> None:
        super().__init__(found)
        self.found, self.expected, self.remedy, self.passing = found, expected, remedy, passing
