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
import tarfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 600  # the largest number of lines that a file outside of test/ should have


def texts(revision: str | None = None) -> dict[str, str]:
    """The text of each file in the working tree, or in ``revision``."""
    command = ["git", "ls-files"] if revision is None else ["git", "archive", revision]
    done = subprocess.run([*command, "--", "*.py", "*.sh"], cwd=ROOT, capture_output=True)
    if done.returncode:
        wrong = done.stderr.decode().strip()
        raise ValueError(f"needs a git checkout and a revision of it: {wrong}")
    if revision is None:
        paths = [ROOT / name for name in done.stdout.decode().splitlines()]
        return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path.exists()}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        files = [member for member in archive if member.isfile()]
        return {file.name: archive.extractfile(file).read().decode() for file in files}


# Tokens that are no code.
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def tokens_a_line(texts: dict[str, str]) -> dict[str, float]:
    """By folder, the mean number of tokens of a line of Python code."""
    tokens, lines = Counter(), Counter()
    for name, text in texts.items():
        if not name.endswith(".py"):
            continue
        statements = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Expr))
        docstrings = {one.lineno for one in statements if isinstance(one.value, ast.Constant)}
        there = [
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in _LAYOUT and token.start[0] not in docstrings
        ]
        tokens[name], lines[name] = len(there), len(set(there))
    tokens, lines = by_folder(tokens), by_folder(lines)
    return {folder: tokens[folder] / lines[folder] for folder in lines if lines[folder]}


def lines_of(texts: dict[str, str]) -> Counter[str]:
    return Counter({name: text.count("\n") for name, text in texts.items()})


def by_folder(lines: Counter[str]) -> Counter[str]:
    """Sums by folder, to a depth of two: ``xla_fsdp/planning`` with all below it, ``xla_fsdp``."""
    sums = Counter()
    for name, number in lines.items():
        parts = name.split("/")[:-1][:2]
        for depth in range(len(parts) + 1):
            sums["/".join(parts[:depth])] += number
    return sums


def table(now: dict[str, str], before: dict[str, str] | None) -> str:
    """The sums of lines, folder by folder, as text."""
    columns = [by_folder(Counter(dict.fromkeys(now, 1))), by_folder(lines_of(now))]
    heads, ratios = ["files", "lines"], [tokens_a_line(now)]
    if before is not None:
        columns += [by_folder(lines_of(before)), by_folder(lines_of(now))]
        columns[-1].subtract(columns[-2])
        heads += ["before", "more"]
        ratios.append(tokens_a_line(before))
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
        now = texts()
        before = None if options.against is None else texts(options.against)
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks.size: {error}", file=sys.stderr)
        return 2
    print(table(now, before))
    for name, number in lines_of(now).most_common():
        if number > LONGEST and not name.startswith("test/"):
            print(f"longer than {LONGEST} lines: {name}, {number:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
