"""Command line: ``python -m xla_fsdp.preflight --measure``.

It prints the report to stdout, and progress and errors to stderr. Exit codes: 0 no test failed
(measurements may differ from published figures), 1 a test failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..planning.reporting.page import target, target_of_plot
from .api import verify
from .stages import STAGES
from .steps import ON_CPU, ON_TPU


def main(argv: Sequence[str]) -> int:
    """Runs the verification and returns the exit code."""
    flags = _parser().parse_args(argv)
    for path in flags.report:
        if not path.endswith((".json", ".html")):
            return _exit_with_error(f"--report={path} must end in .json or .html")
    try:
        # Files that cannot be written raise here, before minutes of measurement.
        for path in flags.report:
            (target if path.endswith(".json") else target_of_plot)(path)
        if flags.calibration:
            target(flags.calibration)
        found = verify(
            num_devices=flags.num_devices,
            ckpt_dir=flags.ckpt_dir,
            seconds=flags.seconds,
            stages=flags.stages,
            sizes=flags.sizes,
            topology=flags.topology,
            say=lambda text: print(f"preflight: {text}", file=sys.stderr, flush=True),
        )
        print(found)
        for path in flags.report:
            (found.save if path.endswith(".json") else found.plot)(path)
        if flags.calibration:
            found.calibration.save(flags.calibration)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        return _exit_with_error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0 if found.ok else 1


def _exit_with_error(text: str) -> int:
    print(f"preflight: {text}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_fsdp.preflight --measure",
        description="Tests this package on these devices: trains, saves, loads and lets a rank"
        " fail. Measures memory, matrix multiplications, collectives and steps.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--report",
        action="append",
        default=[],
        metavar="PATH",
        help="also write the report to this .json or .html file; repeatable. It contains no user"
        " names and no secrets",
    )
    parser.add_argument(
        "--calibration", metavar="PATH", help="write the measured figures to this file, for plans"
    )
    parser.add_argument(
        "--num_devices",
        type=int,
        metavar="N",
        help="number of ranks (default: 4 on CPU, all on TPU)",
    )
    parser.add_argument(
        "--ckpt_dir", metavar="PATH", help="on several hosts: a folder that all of them share"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, metavar="S", help="time limit (default: 600)"
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=STAGES,
        metavar="STAGE",
        help=f"stages to run, of {', '.join(STAGES)} (default: all)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=(*ON_TPU, *ON_CPU),
        default=(),
        metavar="SIZE",
        help=f"steps of this kind of device to run and plan: {', '.join(map(repr, ON_TPU))}; on "
        f"CPU {', '.join(map(repr, ON_CPU))} (default: all)",
    )
    parser.add_argument(
        "--topology",
        metavar="SLICE",
        help="plan the steps for this slice, such as v5litepod-8 (default: this machine's)",
    )
    return parser
