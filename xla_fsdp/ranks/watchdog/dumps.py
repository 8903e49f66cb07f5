"""The stack of a process whose Python does not answer, got by a process beside it."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

from ..cpu.call_site import is_library

# Of the real-time signals, which nothing uses by itself; never sent to a process without a handler.
_SIGNAL = signal.SIGRTMAX - 7
_MEMORY_FILE = "xla_fsdp-stacks"
_CHARACTERS = 6_000
_SECONDS_TO_DUMP = 0.3


def prepare(thread: int) -> dict[str, Any]:
    """How neighbours can get the stack of that thread of this process, by its ident, whoever holds
    Python's lock.

    The handler and its file stay to the end of the process: a signal may be on its way.
    """
    faulthandler.register(_SIGNAL, os.memfd_create(_MEMORY_FILE), all_threads=True)
    return {
        "host": _host(),
        "pid": os.getpid(),
        "thread": f"{thread:#018x}",  # as faulthandler writes it
    }


def neighbours(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether they can signal each other by process ids."""
    return one["host"] == other["host"]


def stack_of(process: dict[str, Any]) -> tuple[str, str]:
    """``file:line`` and stack of a neighbour, the innermost call first, or why there is none."""
    folder = f"/proc/{process['pid']}/fd"
    try:
        links = [f"{folder}/{name}" for name in os.listdir(folder)]
        # With two ranks in a process there are two: it writes into the last one.
        files = [link for link in links if f"/memfd:{_MEMORY_FILE}" in _target(link)]
        if not files or not _handles_it(process["pid"]):
            return "", "  its process has ended\n"  # this is another one with its number
        os.kill(process["pid"], _SIGNAL)
        time.sleep(_SECONDS_TO_DUMP)
        text = "\n".join(Path(file).read_text(errors="replace") for file in files)
    except (FileNotFoundError, ProcessLookupError):
        return "", "  its process has ended\n"
    except OSError as error:  # another user's, perhaps
        return "", f"  its process can not be asked ({error})\n"
    return _own_part(text, process["thread"])


def _own_part(text: str, thread: str) -> tuple[str, str]:
    threads = re.split(r"\n(?=Thread 0x|Current thread 0x)", text)
    own = [one for one in threads if thread in one.partition("\n")[0]]
    if not own:
        return "", "  no stack\n"
    where, lines = "", ["  most recent call first:\n"]
    for line in own[-1].splitlines()[1:]:
        found = re.fullmatch(r'  File "(.*)", line (\d+) in (.*)', line)
        if found and os.path.dirname(found[1]) == os.path.dirname(__file__):
            break  # where the rank's function is called
        if found and not where and not is_library(found[1]):
            where = f"{found[1]}:{found[2]} in {found[3]}"
        lines.append(f"{line}\n")
    return where, "".join(lines)[:_CHARACTERS]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _handles_it(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # nobody's neighbour
