"""Runs python -m xla_fsdp.preflight as a user would, and reads what it prints."""

import subprocess
import sys
import time
from pathlib import Path

from xla_fsdp.pods import tpu_api
from xla_fsdp.pods.probe import VARIABLES
from xla_fsdp.preflight import main

ROOT = Path(__file__).resolve().parent.parent
WHERE = ("--zone", "us-central2-b", "--project", "lab")
PLACE = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "CLOUDSDK_COMPUTE_ZONE")
# No credentials, no proxy and no Google Cloud but what a test gives.
CLEAN = {"GCE_METADATA_HOST": "127.0.0.1:9", "NO_GCE_CHECK": "true"}


def command(api, where, flags):
    return ["--tpu", "pod", *where, "--discovery_url", f"{api.url}discovery", *map(str, flags)]


def environment(key, home):
    return CLEAN | {"HOME": str(home), "GOOGLE_APPLICATION_CREDENTIALS": str(key)}


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def call(monkeypatch, capsys, api, key, home, *flags, env=None, where=WHERE):
    """The finished command, run in this process, which need not import anything again."""
    with monkeypatch.context() as patches:
        for name in (*PLACE, *VARIABLES):
            patches.delenv(name, raising=False)
        for name, value in (environment(key, home) | (env or {})).items():
            patches.setenv(name, value)
        patches.setattr(tpu_api, "time", Clock())
        argv = command(api, where, flags)
        capsys.readouterr()
        code = main(argv)
    return subprocess.CompletedProcess(argv, code, *capsys.readouterr())


def start(api, key, home, *flags):
    """The command, running in its own process."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "xla_fsdp.preflight", *command(api, WHERE, flags)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | environment(key, home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(began):
    """What the command ``began`` printed and ended with."""
    with began:
        try:
            # Minutes more than any of it takes: only what waits forever comes to the end of them.
            said = began.communicate(timeout=1500)
        finally:
            began.kill()
    return subprocess.CompletedProcess(began.args, began.returncode, *said)


def wait_until(ready, began):
    while began.poll() is None and not ready():
        time.sleep(0.05)


def lines(done, code):
    """The status and text of each check, by name; the command ended with ``code``, as it should."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    checks = done.stdout.splitlines()[:-1]
    return {line[9:29].strip(): (line[:8].strip(), line[30:]) for line in checks}


def refusal(done):
    """The one line of a command that checked nothing."""
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line
