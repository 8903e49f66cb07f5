"""The harness of the benchmarks that compare plans: a table of reports, and its flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xla_fsdp
from xla_fsdp import Report
from xla_fsdp.plan_compiler import find_compiler
from xla_fsdp.tpu.topology import resolve

MB, MIB, GIB = 1e6, 2**20, 2**30

Plan = Callable[..., Report]  # plan(slice, compiler=version)


@dataclass(frozen=True)
class Table:
    """The plans of a table by name, each made on ``slices``, and by label the figures to print."""

    slices: tuple[str, ...]
    plans: dict[str, Plan]
    figures: dict[str, Callable[[Report], str]]

    def reports(
        self,
        slices: Sequence[str] = (),
        names: Collection[str] = (),
        compilers: Sequence[str | None] = (None,),
    ) -> Iterator[tuple[str, str, Report]]:
        """Yields slice, name of the row and report; default: all slices and names."""
        for where in slices or self.slices:
            for name, plan in self.plans.items():
                for compiler in compilers if not names or name in names else ():
                    row = by_compiler(name, compiler if len(compilers) > 1 else None)
                    print(f"{row}, on {where}", file=sys.stderr)
                    try:
                        report = plan(where, compiler=compiler)
                    except xla_fsdp.UnusableCompilerError as error:
                        print(error, file=sys.stderr)
                        sys.exit(2)
                    yield where, row, report

    def cells(self, report: Report) -> list[str]:
        return [figure(report) for figure in self.figures.values()]


def plan_of(step: Callable[[], object], **options: Any) -> Plan:
    """A plan of ``step``, with these options of ``xla_fsdp.plan``."""
    return lambda where, compiler=None: xla_fsdp.plan(step, where, compiler=compiler, **options)


def by_compiler(name: str, compiler: str | None) -> str:
    """The name of a row if rows are planned by several compilers."""
    return f"{name}, {compiler}" if compiler else name


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--option``, whose values ``dict()`` makes a dictionary."""
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a compiler option",
        type=lambda option: option.split("=", 1),
    )  # fmt: skip


def require_slices(
    parser: argparse.ArgumentParser, slices: Iterable[str], compilers: Iterable[str | None] = ()
) -> None:
    """Exits with one line and code 2 if one of ``slices`` or of ``compilers`` is unknown."""
    try:
        for name in slices:
            resolve(name)
        for compiler in compilers:
            find_compiler(compiler)
    except (xla_fsdp.UnknownTopologyError, xla_fsdp.UnusableCompilerError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
