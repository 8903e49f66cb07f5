"""Command line: ``python -m xla_fsdp.preflight``.

It prints one line for each check to stdout, and progress and errors to stderr. Exit codes: 0 no
check failed (there may be warnings); 1 a check failed; 2 wrong usage, missing credentials or an
unknown node; 130 interrupted.
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
from .node import Expected, Node, check_node, slice_of_type
from .template import GCLOUD, Template
from .trouble import shown
from .where import NodeLocation, find_node
from .worker_checks import check_answers, check_looks, check_shared_path, check_versions
from .workers import Workers

_MOST = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with ``argv`` (default: that of the process) and returns the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    if "--measure" in given:
        # This imports torch and torch_xla, which the other checks do not need.
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
        epilog="With --measure it tests training on the devices of this machine and measures their"
        " speed, and queries neither the API nor workers. For its flags: --measure --help.",
        prog="python -m xla_fsdp.preflight",
        description="Checks whether a TPU pod is ready for training. It queries the TPU API about"
        " the node, then every worker, and prints one line for each check.",
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
        help="wait up to this time until the node is READY and HEALTHY",
    )
    expected = parser.add_argument_group("expected values")
    expected.add_argument("--accelerator_type", metavar="TYPE", help="such as v3-32")
    expected.add_argument(
        "--runtime_version", metavar="VERSION", help="such as tpu-ubuntu2204-base"
    )
    expected.add_argument(
        "--world_size", type=_number(int, 1), metavar="N", help="number of ranks of the training"
    )
    expected.add_argument(
        "--ckpt_dir",
        metavar="PATH",
        help="checkpoint folder that all workers share and can write to: an absolute path, or a URL"
        " such as gs://bucket/run",
    )
    _add_worker_flags(parser.add_argument_group("the workers"))
    _add_api_flags(parser.add_argument_group("the TPU API"))
    return parser


def _add_worker_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--skip_workers", action="store_true", help="query only the TPU API")
    group.add_argument(
        "--worker_command",
        default=GCLOUD,
        metavar="COMMAND",
        help="command that runs {command} on a worker; {tpu}, {zone}, {project}, {worker} (a"
        " number), {address}, {external_address} and {command} are replaced. Default: %(default)s",
    )
    group.add_argument(
        "--python", default="python3", help="interpreter on the workers (default: %(default)s)"
    )
    group.add_argument(
        "--timeout",
        type=_number(float, 0.1),
        default=60.0,
        metavar="SECONDS",
        help="time limit for each answer of a worker (default: 60)",
    )
    group.add_argument(
        "--parallel",
        type=_number(int, 1),
        default=32,
        metavar="N",
        help="number of workers queried at the same time (default: %(default)s)",
    )
    group.add_argument(
        "--cache_dir",
        default="~/.cache",
        metavar="PATH",
        help="folder for compiled programs on the workers; its free space is checked (default:"
        " %(default)s)",
    )
    group.add_argument(
        "--chip_files",
        default="/dev/accel[0-9]*,/dev/vfio/[0-9]*",
        metavar="PATTERNS",
        help="pattern of the files of the chips on a worker (default: %(default)s)",
    )


def _add_api_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--retries",
        type=_number(int, 0),
        default=4,
        metavar="N",
        help="retries after errors of the server or the network (default: %(default)s)",
    )
    group.add_argument(
        "--api_timeout",
        type=_number(float, 0.1),
        default=20.0,
        metavar="SECONDS",
        help="time limit for one request (default: 20)",
    )
    group.add_argument(
        "--discovery_url",
        metavar="URL",
        help="URL of the document that describes the API (default: $TPU_API_DISCOVERY_URL, else"
        f" {DISCOVERY_URL})",
    )
    group.add_argument(
        "--api_endpoint",
        default="",
        metavar="URL",
        help="address of the API (default: the one in the document of --discovery_url)",
    )


def _number(convert: Callable[[str], float], least: float) -> Callable[[str], float]:
    """Returns a function that parses a number of at least ``least``."""

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
    """Yields each check as soon as it is done; ``options`` are the flags.

    Raises:
        UsageError: the user must change a flag, the credentials or the name first.
        MissingExtraError: the ``pod`` extra is not installed.
    """
    template = _template(options)
    discovery_url = _discovery_url(options)
    if options.api_endpoint:
        _require_url("--api_endpoint", options.api_endpoint)
    where = find_node(options.tpu, options.zone, options.project)
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
    # cloud_tpu_client reads the same variable.
    variable = "TPU_API_DISCOVERY_URL"
    if options.discovery_url:
        return _require_url("--discovery_url", options.discovery_url)
    return _require_url(f"${variable}", os.environ.get(variable) or DISCOVERY_URL)


def _template(options: argparse.Namespace) -> Template | None:
    """The template of the worker command, or ``None`` with --skip_workers; checks the flags."""
    if options.skip_workers:
        if options.ckpt_dir is not None:
            raise UsageError("the workers check --ckpt_dir, so leave out --skip_workers")
        return None
    path = options.ckpt_dir
    if path is not None and not (path.startswith(("/", "~")) or "://" in path):
        raise UsageError(
            f"--ckpt_dir must be an absolute path, or a URL such as gs://..., got {path!r}"
        )
    return Template(options.worker_command)


def _check_workers(
    node: Node, where: NodeLocation, template: Template, options: argparse.Namespace
) -> Iterator[Check]:
    if node.state != "READY" or not node.endpoints:
        yield skipped("workers", "not queried, because the node is not READY or has no workers")
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
    yield from check_looks(answered, slice_of_type(node.accelerator))
    if options.ckpt_dir is not None:
        yield from check_shared_path(workers, answered, options.ckpt_dir)


def _require_url(name: str, url: str) -> str:
    """Returns ``url``, the value of the flag or variable ``name``, if it is valid.

    Raises:
        UsageError: it is not a valid HTTP URL.
    """
    try:
        parts = urlsplit(url)
        # Looking up the host would do this, and raise for a wrong name.
        (parts.hostname or "").encode("idna")
        reason = _wrong(url, parts.scheme, parts.netloc, parts.hostname, parts.port)
    except ValueError as error:  # also UnicodeError
        reason = str(error)
    if reason:
        raise UsageError(
            f"{name} {shown(url)!r}: {reason}; give http://HOST[:PORT]/PATH or https://HOST[:PORT]/PATH"
        )
    return url


def _wrong(url: str, scheme: str, netloc: str, host: str | None, port: int | None) -> str:
    if scheme not in ("http", "https"):
        return "it starts with neither http:// nor https://"
    if not host or "@" in netloc:
        return "it contains a user name" if host else "it has no host"
    if port == 0:
        return "port 0 is not valid"
    if any(char.isspace() or not char.isprintable() for char in url):
        return "it contains spaces or characters that cannot be printed"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
