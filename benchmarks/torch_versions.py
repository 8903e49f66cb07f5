"""Read checkpoints that were written here with other versions of torch.

    python -m benchmarks.torch_versions [--python 2.4.0=/usr/bin/python3.10] [VERSION ...]

The scripts of two pages (PAGES) write checkpoints on ranks in this environment. For each VERSION of
torch (default: 2.4.0, 2.6.0 and the newest that pip finds) an environment without torch_xla is
made. In it, the consolidation package reads, joins and reshards the checkpoints, and torch's FSDP2
continues the training. Then its checkpoint is loaded here. Each environment needs 5 GB and is
deleted afterwards.

The reasons for each ``no`` in the table are below the table; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from xla_fsdp.testing import run_in_ranks

from . import elsewhere
from .tables import line

ROOT = Path(__file__).resolve().parent.parent
NEWEST = "newest"
PAGES = ("docs/how-to/migrate-from-torch-xla.md", "docs/how-to/migrate-to-torchtpu.md")
BACK = "and back here"


def scripts() -> dict[str, str]:
    """The code blocks of PAGES that begin with a file name, by that name."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.M | re.S))


def write(folder: Path) -> None:
    """Write all inputs: rank files (ours and in-tree), a checkpoint, and a DCP directory."""
    for name, text in scripts().items():
        (folder / name).write_text(text.replace("runs/", f"{folder}/"))
    elsewhere.stay(str(folder))
    for name, ranks in (("before", 2), ("after", 3), ("leave", 2)):
        if name == "after":
            prefix = [f"--ckpt_prefix={folder}/before/", "--ckpt_suffix=rank-*-of-*.pth"]
            command = [*prefix, f"--save_path={folder}/joined", "--optimizer"]
            subprocess.run([sys.executable, "-m", "xla_fsdp.consolidate", *command], check=True)
        run_in_ranks(elsewhere.train, ranks, str(folder), name)
    run_in_ranks(elsewhere.write_more, 3, str(folder))


def environment(folder: Path, version: str, python: str) -> str:
    """Make a virtual environment; return the path of its interpreter."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    made = str(folder / "bin" / "python")
    torch = "torch" if version == NEWEST else f"torch=={version}"
    # torch 2.4 is usually installed with this version of numpy.
    numpy = ["numpy<2"] if version.startswith("2.4") else ["numpy"]
    tool = ["uv", "pip", "install", "-q", "--compile-bytecode", "--python", made]
    if subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True).returncode:
        tool = ["pip", f"--python={made}", "install", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", *tool, torch, *numpy, "xxhash", "fsspec", "safetensors"], check=True
    )
    return made


def look(python: str, written: Path, own: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Run the checks in an environment. Returns versions, and for each check "yes" or an error."""
    own.mkdir()
    done = subprocess.run(
        [python, ROOT / "benchmarks" / "elsewhere.py", written, own],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    versions, checks = found["versions"], found["checks"]
    if checks.get(elsewhere.SHARDED, checks[elsewhere.GONE]) == "yes":
        checks[BACK] = elsewhere.tried(
            lambda: run_in_ranks(elsewhere.come_back, 3, str(written), str(own))
        )
    return versions, checks


def table(found: list[tuple[dict[str, str], dict[str, str]]]) -> str:
    """A table with a column for each version, followed by the reason of each ``no``."""
    lines, reasons = [], []
    for name in found[0][0]:
        lines.append(line([name, *(versions[name] for versions, _ in found)]))
    lines.insert(1, line(["---"] * (len(found) + 1)))
    for name in max((checks for _, checks in found), key=len):
        said = [checks.get(name, "-") for _, checks in found]
        lines.append(line([name, *(one if one in ("yes", "-") else "no" for one in said)]))
        for (versions, _), one in zip(found, said, strict=True):
            if one not in ("yes", "-"):
                reasons.append(f"torch {versions['torch']}, {name}: {one}")
    return "\n".join([*lines, *reasons])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=["2.4.0", "2.6.0", NEWEST])
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH")
    given = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in given.python)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = folder / "written"
        written.mkdir()
        write(written)
        for version in given.versions:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                python = environment(
                    Path(place) / "env", version, pythons.get(version, sys.executable)
                )
                rows.append(look(python, written, folder / f"torch-{version}"))
    text = table(rows)
    print(text)
    return 1 if "| no " in text else 0


if __name__ == "__main__":
    raise SystemExit(main())
