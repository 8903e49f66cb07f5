"""What the commands of benchmarks share: checks of names of slices, and tables in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import xla_fsdp
from xla_fsdp import Report
from xla_fsdp.tpu.topology import resolve


def require_slices(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Exits with one line and code 2 if one of ``names`` is not a slice."""
    try:
        for name in names:
            resolve(name)
    except xla_fsdp.UnknownTopologyError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def head(labels: Sequence[str], names: int = 1) -> str:
    """The first two lines of a table: columns of ``names``, then columns of numbers."""
    first = line(labels).replace("|  |", "| |")
    return f"{first}\n|{'---|' * names}{'---:|' * (len(labels) - names)}"


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def cycles(report: Report) -> int:
    """Cycles of compute of a step, by the compiler."""
    return sum(op.cycles * op.times for op in report.schedule.ops)
