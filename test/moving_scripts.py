"""Runs the scripts of the pages on migration."""

import importlib.util
import re
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
