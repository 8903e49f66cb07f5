"""Prints a saved plan, or its comparison with a recorded trace.

Exit codes: 0 success; 2 wrong usage, or a file that cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..wording import to_one_line
from .reporting.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m xla_fsdp.planning",
        description="Prints a plan that Report.save() or --plan_report wrote. With --trace, "
        "compares it with what xla_fsdp.profile or --profile_steps recorded of the same model.",
        allow_abbrev=False,
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument(
        "--trace", metavar="FOLDER", help="with plugins/profile/*/*.xplane.pb; reads the newest"
    )
    parser.add_argument(
        "--plot",
        action="append",
        default=[],
        metavar="PATH",
        help=".html, .trace.json (for Perfetto), or .png without --trace; repeatable",
    )
    flags = parser.parse_args(argv)
    try:
        if not os.path.isfile(flags.plan):
            raise ValueError(f"{flags.plan} is no file. Pass one that Report.save wrote")
        report = Report.load(flags.plan)
        shown = report.compare_trace(flags.trace) if flags.trace else report
        encoding = sys.stdout.encoding or "utf-8"
        print(str(shown).encode(encoding, "replace").decode(encoding))  # "?" for "×" in ASCII
        for path in flags.plot:
            shown.plot(path)
    except (ValueError, ImportError, OSError) as error:
        print(f"plan: {to_one_line(error, 1000)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
