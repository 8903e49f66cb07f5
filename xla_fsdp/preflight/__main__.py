"""Command line: ``python -m xla_fsdp.preflight``.

A line for each check goes to stdout, progress and errors to stderr. Exit codes: 0 no check failed
(warnings may be there); 1 one failed; 2 wrong usage, missing credentials or an unknown node; 130
interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn
from urllib.parse import urlsplit

from ..extras import MissingExtraError
from ..wording import printable
from .api import DISCOVERY_URL, TpuApi, wait_until_usable
from .checks import Check, Status, failed, skipped
from .errors import ApiError, UsageError
from .node import Expected, Node, check_node, slice_of
from .template import GCLOUD, Template
from .trouble import shown
from .where import Where, find_where
from .worker_checks import check_answers, check_looks, check_shared_path, check_versions
from .workers import Workers

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
        for check in _run(arguments, say=lambda line: print(printable(line), file=sys.stderr)):
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


def _run(options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Check]:
    """Yields each check as soon as it is made; ``options`` are the flags.

    Raises:
        UsageError: something must be changed before anything can be checked.
        MissingExtraError: the ``pod`` extra is not installed.
    """
    template = _template(options)
    discovery_url = _discovery_url(options)
    if options.api_endpoint:
        _require_url("--api_endpoint", options.api_endpoint)
    where = find_where(options.tpu, options.zone, options.project)
    api = TpuApi(
        where,
        discovery_url=discovery_url,
        endpoint=options.api_endpoint,
        timeout=options.api_timeout,
        retries=options.retries,
    )
    try:
        node = wait_until_usable(api, options.wait, say)
    except ApiError as error:
        yield failed("TPU API", error.found, error.expected, error.remedy)
        return
    expected = Expected(options.accelerator_type, options.runtime_version, options.world_size)
    yield from check_node(node, where, expected)
    if template is not None:
        yield from _check_workers(node, where, template, options)


def _discovery_url(options: argparse.Namespace) -> str:
    # cloud_tpu_client's own variable.
    variable = "TPU_API_DISCOVERY_URL"
    if options.discovery_url:
        return _require_url("--discovery_url", options.discovery_url)
    return _require_url(f"${variable}", os.environ.get(variable) or DISCOVERY_URL)


def _template(options: argparse.Namespace) -> Template | None:
    """How to reach the workers, if they are to be reached; wrong flags are found first."""
    if options.skip_workers:
        if options.ckpt_dir is not None:
            raise UsageError("--ckpt_dir is looked at by the workers: leave out --skip_workers")
        return None
    path = options.ckpt_dir
    if path is not None and not (path.startswith(("/", "~")) or "://" in path):
        raise UsageError(f"--ckpt_dir {path!r}: give an absolute path, or a URL such as gs://...")
    return Template(options.worker_command)


def _check_workers(
    node: Node, where: Where, template: Template, options: argparse.Namespace
) -> Iterator[Check]:
    if node.state != "READY" or not node.endpoints:
        yield skipped("workers", "not asked, as the node is not READY or has none")
        return
    workers = Workers(
        where,
        node.endpoints,
        template,
        python=options.python,
        seconds=options.timeout,
        at_once=options.parallel,
    )
    answers = workers.ask(
        "look",
        workers.numbers,
        chip_files=options.chip_files.split(","),
        cache_dir=options.cache_dir,
    )
    yield check_answers(answers)
    answered = {number: answer for number, answer in answers.items() if not answer.problem}
    if not answered:
        return
    yield from check_versions({number: answer.data for number, answer in answered.items()})
    yield from check_looks(answered, slice_of(node.accelerator))
    if options.ckpt_dir is not None:
        yield from check_shared_path(workers, answered, options.ckpt_dir)


def _require_url(name: str, url: str) -> str:
    """``url``, which ``name``, a flag or variable, has.

    Raises:
        UsageError: no request could be made to it, now or later.
    """
    try:
        parts = urlsplit(url)
        # What a lookup of the host and a connection do first.
        (parts.hostname or "").encode("idna")
        reason = _wrong(url, parts.scheme, parts.netloc, parts.hostname, parts.port)
    except ValueError as error:  # a UnicodeError too
        reason = str(error)
    if reason:
        raise UsageError(
            f"{name} {shown(url)!r}: {reason}; give http://HOST[:PORT]/PATH or https://HOST[:PORT]/PATH"
        )
    return url


def _wrong(url: str, scheme: str, netloc: str, host: str | None, port: int | None) -> str:
    if scheme not in ("http", "https"):
        return "neither http:// nor https://"
    if not host or "@" in netloc:
        return "a user is named" if host else "no host"
    if port == 0:
        return "nothing listens on port 0"
    if any(char.isspace() or not char.isprintable() for char in url):
        return "it has spaces or characters that can not be printed"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
