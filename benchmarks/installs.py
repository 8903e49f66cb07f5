"""How long `make demo` and `make test` install, with uv and with pip, from empty caches.

    python -m benchmarks.installs [demo|installed]

Each goes into a virtual environment of its own, which is deleted afterwards: 8 GB of space and of
downloads each. uv also compiles the bytecode, as pip does.
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
# "demo", and what `make test` needs as "installed".
EXTRAS = dict(re.findall(r"^\.venv/(\w+): extras := (\S+)$", (ROOT / "Makefile").read_text(), re.M))


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
    parser.add_argument("target", nargs="?", choices=EXTRAS, help="of the Makefile; default: all")
    target = parser.parse_args().target
    rows = []
    for name in [target] if target else EXTRAS:
        for tool in ("uv", "pip"):
            rows.append(f"{name:9} {tool:4} {seconds(tool, EXTRAS[name]):5.0f} s")
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
