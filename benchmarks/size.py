"""Lines by folder: ``python -m benchmarks.size [--against REVISION]``; ``make size`` calls it.

Counts the lines of tracked Python and shell files in the working tree, and the tokens of a line of
Python code, without docstrings and comments. ``--against`` compares with another revision. Needs
only git and the standard library.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
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


# Tokens that are no code.
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def tokens_by_file(
    names: Iterable[str], revision: str | None = None
) -> tuple[Counter[str], Counter[str]]:
    """The number of tokens of each Python file, and of lines that have some."""
    tokens, lines = Counter(), Counter()
    for name in names:
        if not name.endswith(".py"):
            continue
        if revision is None:
            text = (ROOT / name).read_text(encoding="utf-8")
        else:
            command = ["git", "show", f"{revision}:{name}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
            text = done.stdout.decode()
        statements = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Expr))
        docstrings = {one.lineno for one in statements if isinstance(one.value, ast.Constant)}
        there = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in _LAYOUT and token.start[0] not in docstrings:
                tokens[name] += 1
                there.add(token.start[0])
        lines[name] = len(there)
    return tokens, lines


def by_folder(lines: Counter[str]) -> Counter[str]:
    """Sums by folder, to a depth of two: ``xla_fsdp/planning`` with all below it, ``xla_fsdp``."""
    sums = Counter()
    for name, number in lines.items():
        parts = name.split("/")[:-1][:2]
        for depth in range(len(parts) + 1):
            sums["/".join(parts[:depth])] += number
    return sums


def tokens_a_line(names: Iterable[str], revision: str | None = None) -> dict[str, float]:
    """By folder, the mean number of tokens of a line of code."""
    tokens, lines = map(by_folder, tokens_by_file(names, revision))
    return {folder: tokens[folder] / lines[folder] for folder in lines if lines[folder]}


def table(now: Counter[str], before: Counter[str] | None, revision: str | None) -> str:
    """The sums, folder by folder, as text. ``before``: the lines of ``revision``."""
    files = Counter({name: 1 for name in now})
    columns = [by_folder(files), by_folder(now)]
    heads, ratios = ["files", "lines"], [tokens_a_line(now)]
    if before is not None:
        columns += [by_folder(before), by_folder(now)]
        columns[-1].subtract(columns[-2])
        heads += ["before", "more"]
        ratios.append(tokens_a_line(before, revision))
    heads += ["tokens a line", "before"][: len(ratios)]
    rows = []
    for folder in sorted(set().union(*columns), key=lambda name: (name == "", name)):
        depth = folder.count("/")
        label = "  " * depth + (folder.rpartition("/")[2] if folder else "all")
        cells = [f"{column[folder]:,}" for column in columns]
        rows.append([label, *cells, *(f"{one.get(folder, 0):.2f}" for one in ratios)])
    width = max(len(row[0]) for row in rows)
    wide = [max(9, len(head) + 2) for head in heads]
    lines = []
    for first, *cells in [["", *heads], *rows]:
        fields = zip(cells, wide, strict=True)
        lines.append(f"{first:<{width}}" + "".join(f"{cell:>{size}}" for cell, size in fields))
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
    print(table(now, before, options.against))
    for name, number in now.most_common():
        if number > LONGEST and not name.startswith("test/"):
            print(f"longer than {LONGEST} lines: {name}, {number:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
