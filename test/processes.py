"""Processes that tests start: how they begin, and what became of those nobody waits for."""

import gc
import time
from pathlib import Path


def import_for_good():
    """Imports what takes longest. Collections need not look through it, now or later."""
    gc.disable()
    import torch_xla.core.xla_model  # noqa: F401

    gc.freeze()
    gc.enable()


def ended(pid, within=30.0):
    """Whether process ``pid`` has ended, or does ``within`` so many seconds.

    A killed process dies a moment after the signal, and one whose parent is gone may stay listed
    as a zombie for good: nobody waits for it in a container whose first process does not.
    """
    until = time.monotonic() + within
    while _runs(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _runs(pid):
    try:
        stat = Path("/proc", str(int(pid)), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Its name stands in brackets and may hold anything, brackets as well.
    return stat.rpartition(") ")[2][0] not in "ZX"
