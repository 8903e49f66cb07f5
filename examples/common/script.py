"""What every example script does around its training: flags in, errors and exit codes out."""

import os
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from absl import app, flags


class Stop(Exception):
    """Ends the script with a one-line message; code 2 is for wrong usage, as in getopt tools."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code


def run(main: Callable[[SimpleNamespace], None], *, arguments: bool = False) -> None:
    """Parses the command line and calls ``main(options)``.

    ``options`` is a plain object with an attribute for each flag: it can be handed to the ranks,
    which on TPU are processes of their own where flags were never parsed. With ``arguments`` the
    command line may have more than flags, ``options.arguments``.
    """
    app.run(lambda argv: _call(main, argv), flags_parser=partial(_parse, arguments))


def fill_in(options: SimpleNamespace, **defaults: object) -> None:
    """Gives the flags that were not given values that depend on others."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def require(flag: str, condition: Callable, message: str) -> None:
    """Refuses values of ``flag`` for which ``condition(value)`` is false."""
    flags.register_validator(flag, lambda value: value is None or condition(value), message)


def reason(error: Exception) -> str:
    """What went wrong, in one line; of the system's errors only its words, without the path."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split())


def list_flags(program: str) -> None:
    """Lets --help of ``program`` list the flags of the shared helpers too, but not absl's own."""
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if module.partition(".")[0] == "common":
            for flag in defined:
                flags.FLAGS.register_key_flag_for_module(program, flag)


def _parse(arguments: bool, argv: list[str]) -> list[str]:
    list_flags(argv[0])
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1 and not arguments:
            raise flags.Error(f"unexpected argument {rest[1]!r}")
    except SystemExit:
        sys.exit(0)  # --help, after which absl ends with 1
    except flags.Error as error:
        _end(argv, f"{' '.join(str(error).split())} (--help lists the flags)", 2)
    return rest


def _call(main: Callable[[SimpleNamespace], None], argv: list[str]) -> None:
    try:
        main(SimpleNamespace(**flags.FLAGS.flag_values_dict(), arguments=argv[1:]))
    except KeyboardInterrupt:
        _end(argv, "interrupted", 130)
    except Exception as error:
        # What a rank raised arrives as the cause of a RankError, from CPU ranks.
        stop = error if isinstance(error, Stop) else error.__cause__
        if not isinstance(stop, Stop):
            raise
        _end(argv, stop.message, stop.code)


def _end(argv: list[str], message: str, code: int) -> None:
    print(f"{os.path.basename(argv[0])}: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
