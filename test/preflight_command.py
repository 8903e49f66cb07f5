"""Runs python -m xla_fsdp.preflight as a user would, and reads what it says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHERE = ("--zone", "us-central2-b", "--project", "lab")
# No credentials, no proxy and no Google Cloud but what a test gives.
CLEAN = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": str(ROOT),
    "GCE_METADATA_HOST": "127.0.0.1:9",
    "NO_GCE_CHECK": "true",
}


def start(api, key, home, *flags, env=None, where=WHERE):
    """The command, running, with the credentials ``key`` and its HOME in ``home``."""
    environment = CLEAN | {"HOME": str(home), "GOOGLE_APPLICATION_CREDENTIALS": str(key)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "xla_fsdp.preflight", "--tpu", "pod", *where]
        + ["--discovery_url", f"{api.url}discovery", *flags],
        env=environment | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(began):
    """What the command ``began`` said and ended with."""
    with began:
        try:
            # Minutes more than any of it takes: only what waits for ever comes to the end of them.
            said = began.communicate(timeout=1500)
        finally:
            began.kill()
    return subprocess.CompletedProcess(began.args, began.returncode, *said)


def lines(done, code):
    """The status and text of each check, by name; the command ended with ``code``, as it should."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    checks = done.stdout.splitlines()[:-1]
    return {line[9:29].strip(): (line[:8].strip(), line[30:]) for line in checks}


def refusal(done):
    """The one line that a command which checked nothing said."""
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line
