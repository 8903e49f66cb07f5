"""Runs examples the way a user does, and reads the table that they end with."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(server, folder, script, *flags, timeout, **environment):
    """Runs ``script`` in ``folder``, which its caches are put into as well."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    command = [str(EXAMPLES / script), *flags]
    if script != "evaluate.py":
        return server.run(command, cwd=folder, env=environment, timeout=timeout)
    # It is to work where there is no torch_xla, and the server's processes have imported that.
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


def table(done):
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^│ (.+?) +│ (.*?) +│$", done.stdout, flags=re.MULTILINE))


def curve(folder, name):
    """A TensorBoard curve: values by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}
