"""Lines by folder: ``python -m benchmarks.size [--against REVISION]``; ``make size`` calls it.

Counts the lines of tracked Python and shell files in the working tree, and compares them with
another revision. Needs only git and the standard library.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 600  # the largest number of lines that a file outside of test/ should have


def lines_by_file(revision: str | None = None) -> Counter[str]:
    """The number of lines of each file in the working tree, or in ``revision``."""
    where = [] if revision is None else [revision]
    command = ["git", "grep", "-c", "", *where, "--", "*.py", "*.sh"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: nothing found
        raise ValueError(f"needs a git checkout and a revision of it: {done.stderr.strip()}")
    found = Counter()
    for line in done.stdout.splitlines():
        name, _, number = line.rpartition(":")
        found[name.removeprefix(f"{revision}:")] = int(number)
    return found


def by_folder(lines: Counter[str]) -> Counter[str]:
    """Sums by folder, to a depth of two: ``xla_fsdp/planning`` with all below it, ``xla_fsdp``."""
    sums = Counter()
    for name, number in lines.items():
        parts = name.split("/")[:-1][:2]
        for depth in range(len(parts) + 1):
            sums["/".join(parts[:depth])] += number
    return sums


def table(now: Counter[str], before: Counter[str] | None) -> str:
    """The sums, folder by folder, as text."""
    files = Counter({name: 1 for name in now})
    columns = [by_folder(files), by_folder(now)]
    heads = ["files", "lines"]
    if before is not None:
        columns += [by_folder(before), by_folder(now)]
        columns[-1].subtract(columns[-2])
        heads += ["before", "more"]
    rows = []
    for folder in sorted(set().union(*columns), key=lambda name: (name == "", name)):
        depth = folder.count("/")
        label = "  " * depth + (folder.rpartition("/")[2] if folder else "all")
        rows.append([label, *(f"{column[folder]:,}" for column in columns)])
    width = max(len(row[0]) for row in rows)
    lines = [" " * width + "".join(f"{head:>9}" for head in heads)]
    lines += [f"{row[0]:<{width}}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Print the table, and the files that are too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("--against", metavar="REVISION", help="the revision to compare with")
    options = parser.parse_args()
    try:
        now = lines_by_file()
        before = None if options.against is None else lines_by_file(options.against)
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks.size: {error}", file=sys.stderr)
        return 2
    print(table(now, before))
    for name, number in now.most_common():
        if number > LONGEST and not name.startswith("test/"):
            print(f"longer than {LONGEST} lines: {name}, {number:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
