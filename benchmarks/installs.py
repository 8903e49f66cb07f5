"""How long `make demo` and `make test` install, with uv and with pip, from empty caches.

    python -m benchmarks.installs [demo|test] ...

Each goes into a virtual environment of its own, which is deleted afterwards: 8 GB of space and of
downloads each. uv also compiles the bytecode, as pip does.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {"demo": "demo", "test": "examples,hf,plan,pod,test,lint"}


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
    parser.add_argument("targets", nargs="*", choices=[*EXTRAS, []], help="default: all")
    rows = []
    for target in parser.parse_args().targets or EXTRAS:
        for tool in ("uv", "pip"):
            rows.append(f"{target:5} {tool:4} {seconds(tool, EXTRAS[target]):5.0f} s")
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
