"""Processes that tests start: how they begin, and what became of those nobody waits for."""

import contextlib
import gc
import socket
import subprocess
import time
from pathlib import Path


def import_for_good():
    gc.disable()
    import torch_xla.core.xla_model  # noqa: F401

    gc.freeze()
    gc.enable()


def comes(condition, within=600.0):
    """Whether ``condition()`` is true, or becomes so ``within`` so many seconds."""
    until = time.monotonic() + within
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def ended(pid, within=300.0):
    """Whether process ``pid`` has ended, or does ``within`` so many seconds.

    A killed process dies a moment after the signal, and one whose parent is gone may stay listed
    as a zombie for good: nobody waits for it in a container whose first process does not.
    """
    return comes(lambda: not _runs(pid), within)


def _runs(pid):
    try:
        stat = Path("/proc", str(int(pid)), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Its name stands in brackets and may hold anything, brackets as well.
    return stat.rpartition(") ")[2][0] not in "ZX"


@contextlib.contextmanager
def free_port():
    """A port that a script can listen on, and nobody else takes before it does."""
    with socket.socket() as held:
        # With this, one may listen where another, that does not listen, is bound.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def shell_script(path, text):
    """The path of an executable with these lines."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run_command(*words, code=0, **how):
    """What the command printed; it has ended with ``code``, or with any for None."""
    how = {"capture_output": True, "text": True, "timeout": 1500, **how}
    done = subprocess.run([str(word) for word in words], **how)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done
