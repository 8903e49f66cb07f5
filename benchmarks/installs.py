"""The time that `make demo` and `make test` take to install, with uv and with pip, without caches.

    python -m benchmarks.installs [demo|installed]

Each installs into a separate virtual environment, which is deleted afterwards, and needs 8 GB of
disk space and of downloads. uv also compiles the bytecode, as pip does.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# "demo" is for `make demo`, "installed" for `make test`.
EXTRAS = dict(
    re.findall(r"^\$\(VENV\)/(\w+): extras := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
)


def seconds(tool: str, extras: str) -> float:
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "-q", "uv"], check=True)
        commands = {
            "uv": ["uv", "pip", "install", "--compile-bytecode", "--no-cache", "--python", python],
            "pip": ["pip", "install", "--no-cache-dir"],
        }
        start = time.monotonic()
        subprocess.run([python, "-m", *commands[tool], f"{ROOT}[{extras}]"], check=True)
        return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "target", nargs="?", choices=EXTRAS, help="a target of the Makefile; default: all"
    )
    target = parser.parse_args().target
    rows = []
    for name in [target] if target else EXTRAS:
        for tool in ("uv", "pip"):
            rows.append(f"{name:9} {tool:4} {seconds(tool, EXTRAS[name]):5.0f} s")
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
