"""What became of processes that a test does not wait for itself."""

import time
from pathlib import Path


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
