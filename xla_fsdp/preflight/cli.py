"""Command line: ``python -m xla_fsdp.preflight``.

A line for each check goes to stdout, progress and errors to stderr. Exit codes: 0 no check failed
(warnings may be there); 1 one failed; 2 wrong usage, missing credentials or an unknown node; 130
interrupted.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..extras import MissingExtraError
from ..wording import printable
from .api import DISCOVERY_URL
from .checks import Status
from .errors import UsageError
from .run import run
from .template import GCLOUD

_MOST = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run with `argv` (default: of the process) and return the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    if "--measure" in given:
        # With torch and torch_xla, which nothing else here needs.
        from ..verifying.cli import main as measure

        return measure([flag for flag in given if flag != "--measure"])
    arguments = _parser().parse_args(argv)
    counts: Counter[Status] = Counter()
    try:
        for check in run(arguments, say=lambda line: print(printable(line), file=sys.stderr)):
            print(check.line(), flush=True)
            counts[check.status] += 1
    except (UsageError, MissingExtraError) as error:
        print(f"preflight: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    summary = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    print(f"{arguments.tpu}: {summary}")
    return 1 if counts[Status.FAILED] else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"preflight: {message} (--help lists the flags)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        epilog="With --measure: runs and measures on the devices of this machine what is promised,"
        " asks no API and no worker, and has flags of its own: --measure --help.",
        prog="python -m xla_fsdp.preflight",
        description="Is a TPU pod fit to train on? Asks the TPU API about the node, then every"
        " worker about itself, and prints a line for each check.",
        allow_abbrev=False,
    )
    node = parser.add_argument_group("the node")
    node.add_argument("--tpu", required=True, metavar="NAME", help="name of the node")
    node.add_argument("--zone", help="default: $CLOUDSDK_COMPUTE_ZONE, or this machine's")
    node.add_argument(
        "--project",
        help="default: $GOOGLE_CLOUD_PROJECT, $CLOUDSDK_CORE_PROJECT, or this machine's",
    )
    node.add_argument(
        "--wait",
        type=_number(float, 0),
        default=0.0,
        metavar="SECONDS",
        help="wait so long until the node is READY and HEALTHY",
    )
    expected = parser.add_argument_group("what is expected")
    expected.add_argument("--accelerator_type", metavar="TYPE", help="such as v3-32")
    expected.add_argument(
        "--runtime_version", metavar="VERSION", help="such as tpu-ubuntu2204-base"
    )
    expected.add_argument(
        "--world_size", type=_number(int, 1), metavar="N", help="ranks that training will have"
    )
    expected.add_argument(
        "--ckpt_dir",
        metavar="PATH",
        help="must be writable by all workers and shared by them: an absolute path or a URL such"
        " as gs://bucket/run",
    )
    _add_worker_flags(parser.add_argument_group("the workers"))
    _add_api_flags(parser.add_argument_group("the TPU API"))
    return parser


def _add_worker_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--skip_workers", action="store_true", help="ask only the TPU API")
    group.add_argument(
        "--worker_command",
        default=GCLOUD,
        metavar="COMMAND",
        help="reaches a worker; {tpu}, {zone}, {project}, {worker} (a number), {address},"
        " {external_address} and {command} are filled in. Default: %(default)s",
    )
    group.add_argument(
        "--python", default="python3", help="the interpreter there (default: %(default)s)"
    )
    group.add_argument(
        "--timeout",
        type=_number(float, 0.1),
        default=60.0,
        metavar="SECONDS",
        help="for each answer of a worker (default: 60)",
    )
    group.add_argument(
        "--parallel",
        type=_number(int, 1),
        default=32,
        metavar="N",
        help="workers asked at a time (default: %(default)s)",
    )
    group.add_argument(
        "--cache_dir",
        default="~/.cache",
        metavar="PATH",
        help="where compiled programs will be kept there; looked at for space (default:"
        " %(default)s)",
    )
    group.add_argument(
        "--chip_files",
        default="/dev/accel[0-9]*,/dev/vfio/[0-9]*",
        metavar="PATTERNS",
        help="where chips show there, a file each (default: %(default)s)",
    )


def _add_api_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--retries",
        type=_number(int, 0),
        default=4,
        metavar="N",
        help="after errors of the server and the network (default: %(default)s)",
    )
    group.add_argument(
        "--api_timeout",
        type=_number(float, 0.1),
        default=20.0,
        metavar="SECONDS",
        help="for one request (default: 20)",
    )
    group.add_argument(
        "--discovery_url",
        metavar="URL",
        help="of the document that describes the API (default: $TPU_API_DISCOVERY_URL, else"
        f" {DISCOVERY_URL})",
    )
    group.add_argument(
        "--api_endpoint", default="", metavar="URL", help="asked instead of what it names"
    )


def _number(convert: Callable[[str], float], least: float) -> Callable[[str], float]:
    """Reads a number of at least ``least``."""

    def read(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not least <= value <= _MOST:  # also not a number
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {_MOST}")
        return value

    return read
