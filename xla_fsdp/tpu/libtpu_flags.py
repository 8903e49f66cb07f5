"""Flags in ``LIBTPU_INIT_ARGS``: how libtpu reads them, and which it does not know.

libtpu parses them as Abseil (abseil.io/docs/cpp/guides/flags): ``--name=value``, ``--name value``,
``--name`` and ``--noname``. The last of two values counts; words without dashes, and all after
``--``, are ignored; an unknown flag ends the process. ``python -I -S libtpu_flags.py LIBRARY``
lists unknown flags on standard error.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

ARGUMENTS = "LIBTPU_INIT_ARGS"
_UNKNOWN = re.compile(r"^ERROR: Unknown command line flag '([^']*)'", re.MULTILINE)
_ILLEGAL = re.compile(r"^ERROR: (?!Unknown command line flag)(.*)$", re.MULTILINE)
# Known to no libtpu, so that the process ends before libtpu searches for chips.
_ASKING = "xla_fsdp_is_asking"
_SECONDS = 60


def parse_arguments(arguments: str) -> dict[str, str]:
    """Names and values of ``arguments``, as libtpu reads them; "true" for a bare name.

    A word after a bare name is its value here; for boolean flags, which only libtpu knows, it is
    ignored.
    """
    words = arguments.split()
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if word == "--":
            break
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            follows = words[place + 1] if place + 1 < len(words) else ""
            value = "true" if not follows or follows.startswith("-") else follows
            if name.startswith("no"):
                name, value = name[2:], "false"
        found.pop(name, None)  # the order in which they count
        found[name] = value
    return found


def to_arguments(options: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def with_last(arguments: str, options: Mapping[str, str]) -> str:
    words = arguments.split()
    end = words.index("--") if "--" in words else len(words)
    return " ".join([*words[:end], *to_arguments(options)])


def with_undefok(arguments: str, names: Sequence[str]) -> str:
    """``arguments`` with unknown ``names`` in ``undefok``.

    torch_xla would add its own again if they were removed.
    """
    if not names:
        return " ".join(arguments.split())
    allowed = parse_arguments(arguments).get("undefok", "")
    words = arguments.split()
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if not word.lstrip("-").startswith("undefok=")]
    named = ",".join(dict.fromkeys([*filter(None, allowed.split(",")), *names]))
    return " ".join([f"--undefok={named}", *kept, *words[end:]])


@dataclass(frozen=True)
class Refusal:
    """Names of ``unknown`` flags, and libtpu's messages on ``illegal`` values and forms."""

    unknown: tuple[str, ...] = ()
    illegal: tuple[str, ...] = ()


# Takes 0.1 s; the plans of a process pass the same arguments.
@lru_cache(maxsize=64)
def refusal(arguments: str, library: str | None) -> Refusal:
    """What the libtpu at ``library`` refuses of ``arguments``; nothing without an answer."""
    if not library:
        return Refusal()
    environment = {
        ARGUMENTS: f"--{_ASKING} {arguments}",
        "TPU_SKIP_MDS_QUERY": "1",  # no network access
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_MIN_LOG_LEVEL": "3",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__, library],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Refusal()
    unknown = [name for name in _UNKNOWN.findall(done.stderr) if name != _ASKING]
    return Refusal(tuple(dict.fromkeys(unknown)), tuple(_ILLEGAL.findall(done.stderr)))


def library(environ: Mapping[str, str] = os.environ) -> str | None:
    """The libtpu of ``TPU_LIBRARY_PATH``, of torch_xla's import, or of the package; else None."""
    for name in ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH"):
        if environ.get(name):
            return environ[name]
    package = find_spec("libtpu")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "libtpu.so"
    return str(path) if path.is_file() else None


class _InitializeArguments(ctypes.Structure):
    """``PJRT_Plugin_Initialize_Args`` of pjrt_c_api.h."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]


class _PjrtApi(ctypes.Structure):
    """The beginning of ``PJRT_Api`` of pjrt_c_api.h."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("error_destroy", ctypes.c_void_p),
        ("error_message", ctypes.c_void_p),
        ("error_get_code", ctypes.c_void_p),
        (
            "plugin_initialize",
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_InitializeArguments)),
        ),
    ]


def _initialize_plugin(library: str) -> None:
    get_api = ctypes.CDLL(library).GetPjrtApi
    get_api.restype = ctypes.POINTER(_PjrtApi)
    arguments = _InitializeArguments(ctypes.sizeof(_InitializeArguments), None)
    get_api().contents.plugin_initialize(ctypes.byref(arguments))


if __name__ == "__main__":
    _initialize_plugin(sys.argv[1])
