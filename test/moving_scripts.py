"""Runs the scripts of the pages on migration."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading

from conftest import ROOT

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
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)},
        **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    }
    started = [
        subprocess.Popen(
            [sys.executable, script],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    printed = [process.communicate(timeout=240)[0] for process in started]
    assert not any(process.returncode for process in started)
    return printed
