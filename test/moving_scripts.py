"""Runs the scripts of the pages on migration."""

import importlib.util
import os
import re
import subprocess
import sys
import threading

from conftest import ROOT
from processes import free_port

PAGES = ("docs/how-to/migrate-from-torch-xla.md", "docs/how-to/migrate-to-torchtpu.md")
_importing = threading.Lock()


def scripts():
    """The code blocks of PAGES that begin with a file name, by that name."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.M | re.S))


def train(rank, folder, name):
    """Calls ``train`` of a script in the folder on this rank."""
    with _importing:  # ranks are threads
        sys.path.insert(0, folder)
        try:
            spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(folder)
            sys.modules.pop("network", None)
    return module.train(rank)


def torchrun(script, processes):
    """Starts processes as torchrun does, on localhost; returns what each prints."""
    with free_port() as port:
        shared = {
            **{**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)},
        }
        started = [
            subprocess.Popen(
                [sys.executable, script], stdout=subprocess.PIPE, text=True,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(processes)
        ]  # fmt: skip
        printed = [process.communicate(timeout=1500)[0] for process in started]
    assert not any(process.returncode for process in started)
    return printed
