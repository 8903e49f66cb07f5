"""Common code of the example scripts: parses flags, prints errors, sets exit codes."""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

from absl import app, flags

# The modules with flags that scripts import.
SHARED = ("common", "image_batches", "sampling", "tokens", "updates", "wrapping")
flags.disclaim_key_flags()  # flags of DEFINE_number belong to its caller


class Stop(Exception):
    """Ends the script with a one-line message; code 2 is for wrong usage, as in getopt tools."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code


def run(main: Callable[[SimpleNamespace], None]) -> None:
    """Parses the command line and calls ``main(options)``, with an attribute for each flag.

    ``options`` is a plain object, which can be passed to ranks: on TPU these are processes that
    have not parsed the flags.
    """
    app.define_help_flags()
    list_flags(sys.argv[0])
    try:
        if rest := flags.FLAGS(sys.argv)[1:]:
            raise flags.Error(f"unexpected argument {rest[0]!r}")
    except SystemExit:
        sys.exit(0)  # after --help, for which absl would exit with 1
    except flags.Error as error:
        end(f"{to_one_line(error, None)} (--help lists the flags)", 2)
    try:
        main(SimpleNamespace(**flags.FLAGS.flag_values_dict()))
    except KeyboardInterrupt:
        end("interrupted", 130)
    except Exception as error:
        # An exception of a CPU rank is the cause of a RankError.
        stop = error if isinstance(error, Stop) else error.__cause__
        if not isinstance(stop, Stop):
            raise
        end(stop.message, stop.code)


def end(message: str, code: int) -> None:
    """Ends the process with one line."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def to_one_line(error: BaseException, most: int | None = 300) -> str:
    """The message of an error in one line; for an OSError without the path."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split())[:most]


def fill_in(options: SimpleNamespace, **defaults: object) -> None:
    """Sets flags that were not given to defaults that depend on other flags."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def given(options: SimpleNamespace, *flags: str) -> list[str]:
    """The ``flags`` that are set, with two dashes; "noNAME" means that NAME is set to false."""

    def is_set(name: str) -> bool:
        if hasattr(options, name):
            return bool(getattr(options, name))
        return getattr(options, name.removeprefix("no")) is False

    return [f"--{name}" for name in flags if is_set(name)]


def exclude(options: SimpleNamespace, flag: str, *others: str) -> None:
    """Raises Stop if ``flag`` and one of ``others`` are set, all named as in :func:`given`."""
    if given(options, flag) and (found := given(options, *others)):
        raise Stop(f"--{flag} excludes {found[0]}", code=2)


def require(flag: str, condition: Callable, message: str) -> None:
    """Rejects values of ``flag`` for which ``condition(value)`` is false."""
    flags.register_validator(flag, lambda value: value is None or condition(value), message)


def DEFINE_number(name: str, default: float | None, help: str, interval: str) -> None:
    """Defines a flag for a number in ``interval``, such as "[0, 1)", or "(0, inf)" if finite."""
    low, high = map(float, interval[1:-1].split(","))
    first, last = interval[0] == "[", interval[-1] == "]"
    above = f"{'at least' if first else 'greater than'} {low:.9g}"
    words = f"{above} and {'at most' if last else 'less than'} {high:.9g}"
    if high == float("inf"):
        words = above if last else f"finite, {above}"
    elif first and last:
        words = f"from {low:.9g} to {high:.9g}"
    flags.DEFINE_float(name, default, help)

    def inside(value: float) -> bool:
        return low <= value <= high and (first or value > low) and (last or value < high)

    require(name, inside, f"must be {words}")


def list_flags(program: str) -> None:
    """Makes --help of ``program`` also list the flags of the helpers, but not those of absl."""
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        for flag in defined if module.partition(".")[0] in SHARED else ():
            flags.FLAGS.register_key_flag_for_module(program, flag)
