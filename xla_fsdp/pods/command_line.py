"""Command line: ``python -m xla_fsdp.preflight``. Progress and errors go to stderr.

Exit codes: 0 no check failed; 1 a check failed; 2 wrong usage, missing credentials or an unknown
node; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn
from urllib.parse import urlsplit

from ..extras import MissingExtraError
from ..wording import printable
from .findings import ApiError, Finding, Status, UsageError, count_by_status, failed, skipped
from .node import Node, NodeLocation, check_node, slice_of_type
from .tpu_api import DISCOVERY_URL, TpuApi, find_node, redact_url
from .worker_checks import check_answers, check_looks, check_shared_path, check_versions
from .workers import GCLOUD, Template, Workers

_MOST = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    run = _check_pod
    errors: tuple[type[Exception], ...] = (UsageError, MissingExtraError)
    if "--measure" in given:
        given = [flag for flag in given if flag != "--measure"]
        run, errors = _measure, (ValueError, ImportError, OSError, RuntimeError)
    try:
        return run(given)
    except errors as error:
        _print_line(f"preflight: {error}")
        return 2
    except KeyboardInterrupt:
        _print_line("interrupted")
        return 130


def _print_line(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _check_pod(argv: Sequence[str]) -> int:
    options = _pod_parser().parse_args(argv)
    found = []
    for finding in _run_checks(options):
        print(finding.line(), flush=True)
        found.append(finding)
    print(f"{options.tpu}: {count_by_status(found)}")
    return int(any(finding.status is Status.FAILED for finding in found))


def _measure(argv: Sequence[str]) -> int:
    # These import torch, which the other checks do not need.
    from ..planning.reporting.page import require_parent
    from .verify import verify

    flags = vars(_measure_parser().parse_args(argv))
    reports, calibration = flags.pop("report"), flags.pop("calibration")
    for path in reports:
        if not path.endswith((".json", ".html")):
            raise ValueError(f"--report={path} must end in .json or .html")
    # Files that cannot be written raise here, before minutes of measurement.
    for path in filter(None, [*reports, calibration]):
        require_parent(path)
    found = verify(**flags, say=lambda text: _print_line(f"preflight: {text}"))
    print(found)
    for path in reports:
        (found.save if path.endswith(".json") else found.plot)(path)
    if calibration:
        found.calibration.save(calibration)
    return 0 if found.ok else 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"preflight: {message} (--help lists the flags)\n")


def _measure_parser() -> argparse.ArgumentParser:
    from .stages import STAGES
    from .steps import ON_CPU, ON_TPU

    parser = _Parser(
        prog="python -m xla_fsdp.preflight --measure",
        description="Tests this package on these devices: trains, saves, loads and lets a rank"
        " fail. Measures memory, matrix multiplications, collectives and steps.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    help = (
        "also write the report to this .json or .html file; repeatable. It contains no user names"
        " and no secrets"
    )
    add("--report", action="append", default=[], metavar="PATH", help=help)
    help = "write the measured figures to this file, for plans"
    add("--calibration", metavar="PATH", help=help)
    help = "number of ranks (default: 4 on CPU, all on TPU)"
    add("--num_devices", type=int, metavar="N", help=help)
    help = "on several hosts: a folder that all of them share"
    add("--ckpt_dir", metavar="PATH", help=help)
    help = "time limit (default: 600)"
    add("--seconds", type=float, default=600.0, metavar="S", help=help)
    help = f"stages to run, of {', '.join(STAGES)} (default: all)"
    add("--stages", nargs="+", choices=STAGES, default=tuple(STAGES), metavar="STAGE", help=help)
    help = (
        f"steps of this kind of device to run and plan: {', '.join(map(repr, ON_TPU))}; on "
        f"CPU {', '.join(map(repr, ON_CPU))} (default: all)"
    )
    add("--sizes", nargs="+", choices=(*ON_TPU, *ON_CPU), default=(), metavar="SIZE", help=help)
    help = "plan the steps for this slice, such as v5litepod-8 (default: this machine's)"
    add("--topology", metavar="SLICE", help=help)
    return parser


def _pod_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        epilog="With --measure it tests training on the devices of this machine and measures their"
        " speed, and queries neither the API nor workers. For its flags: --measure --help.",
        prog="python -m xla_fsdp.preflight",
        description="Checks whether a TPU pod is ready for training. It queries the TPU API about"
        " the node, then every worker, and prints one line for each check.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("the node").add_argument
    add("--tpu", required=True, metavar="NAME", help="name of the node")
    add("--zone", help="default: $CLOUDSDK_COMPUTE_ZONE, or this machine's")
    help = "default: $GOOGLE_CLOUD_PROJECT, $CLOUDSDK_CORE_PROJECT, or this machine's"
    add("--project", help=help)
    help = "wait up to this time until the node is READY and HEALTHY"
    add("--wait", type=_number_type(float, 0), default=0.0, metavar="SECONDS", help=help)

    add = parser.add_argument_group("expected values").add_argument
    add("--accelerator_type", metavar="TYPE", help="such as v3-32")
    add("--runtime_version", metavar="VERSION", help="such as tpu-ubuntu2204-base")
    help = "number of ranks of the training"
    add("--world_size", type=_number_type(int, 1), metavar="N", help=help)
    help = (
        "checkpoint folder that all workers share and can write to: an absolute path, or a URL"
        " such as gs://bucket/run"
    )
    add("--ckpt_dir", metavar="PATH", help=help)

    add = parser.add_argument_group("the workers").add_argument
    add("--skip_workers", action="store_true", help="query only the TPU API")
    help = (
        "command that runs {command} on a worker; {tpu}, {zone}, {project}, {worker} (a"
        " number), {address}, {external_address} and {command} are replaced. Default: %(default)s"
    )
    add("--worker_command", default=GCLOUD, metavar="COMMAND", help=help)
    help = "interpreter on the workers (default: %(default)s)"
    add("--python", default="python3", help=help)
    help = "time limit for each answer of a worker (default: 60)"
    add("--timeout", type=_number_type(float, 0.1), default=60.0, metavar="SECONDS", help=help)
    help = "number of workers queried at the same time (default: %(default)s)"
    add("--parallel", type=_number_type(int, 1), default=32, metavar="N", help=help)
    help = (
        "folder for compiled programs on the workers; its free space is checked (default:"
        " %(default)s)"
    )
    add("--cache_dir", default="~/.cache", metavar="PATH", help=help)
    patterns = "/dev/accel[0-9]*,/dev/vfio/[0-9]*"
    help = "pattern of the files of the chips on a worker (default: %(default)s)"
    add("--chip_files", default=patterns, metavar="PATTERNS", help=help)

    add = parser.add_argument_group("the TPU API").add_argument
    help = "retries after errors of the server or the network (default: %(default)s)"
    add("--retries", type=_number_type(int, 0), default=4, metavar="N", help=help)
    help = "time limit for one request (default: 20)"
    add("--api_timeout", type=_number_type(float, 0.1), default=20.0, metavar="SECONDS", help=help)
    help = (
        "URL of the document that describes the API (default: $TPU_API_DISCOVERY_URL, else"
        f" {DISCOVERY_URL})"
    )
    add("--discovery_url", metavar="URL", help=help)
    help = "address of the API (default: the one in the document of --discovery_url)"
    add("--api_endpoint", default="", metavar="URL", help=help)
    return parser


def _number_type(convert: Callable[[str], float], least: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = convert(text)
            if least <= value <= _MOST:  # not NaN
                return value
        kind = "whole number" if convert is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} from {least} to {_MOST}")

    return read


def _run_checks(options: argparse.Namespace) -> Iterator[Finding]:
    template = _template(options)
    name, url = "--discovery_url", options.discovery_url
    if not url:  # cloud_tpu_client reads it too
        name, url = "$TPU_API_DISCOVERY_URL", os.environ.get("TPU_API_DISCOVERY_URL")
    url = url or DISCOVERY_URL
    endpoint = options.api_endpoint
    _require_url(name, url)
    if endpoint:
        _require_url("--api_endpoint", endpoint)
    where = find_node(options.tpu, options.zone, options.project)
    api = TpuApi(where, url, endpoint, options.api_timeout, options.retries)
    try:
        node = api.wait_until_usable(options.wait, _print_line)
    except ApiError as error:
        yield failed("TPU API", error.found, error.expected, error.remedy)
        return
    accelerator, runtime = options.accelerator_type, options.runtime_version
    yield from check_node(node, where, accelerator, runtime, options.world_size)
    if template is not None:
        yield from _check_workers(node, where, template, options)


def _template(options: argparse.Namespace) -> Template | None:
    """The worker command, or ``None`` with --skip_workers; checks the flags."""
    path = options.ckpt_dir
    if path is not None and options.skip_workers:
        raise UsageError("the workers check --ckpt_dir, so leave out --skip_workers")
    if options.skip_workers:
        return None
    if path is not None and not (path.startswith(("/", "~")) or "://" in path):
        raise UsageError(
            f"--ckpt_dir must be an absolute path, or a URL such as gs://..., got {path!r}"
        )
    return Template(options.worker_command)


def _check_workers(
    node: Node, where: NodeLocation, template: Template, options: argparse.Namespace
) -> Iterator[Finding]:
    if node.state != "READY" or not node.endpoints:
        yield skipped("workers", "not queried, because the node is not READY or has no workers")
        return
    python, timeout, parallel = options.python, options.timeout, options.parallel
    workers = Workers(where, node.endpoints, template, python, timeout, parallel)
    patterns, cache = options.chip_files.split(","), options.cache_dir
    answers = workers.ask("look", workers.numbers, chip_files=patterns, cache_dir=cache)
    yield check_answers(answers)
    answered = {number: answer for number, answer in answers.items() if not answer.problem}
    if not answered:
        return
    wanted = slice_of_type(node.accelerator)
    yield from check_versions(answered, wanted)
    yield from check_looks(answered, wanted)
    if options.ckpt_dir is not None:
        yield from check_shared_path(workers, answered, options.ckpt_dir)


def _require_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        reason = ""
        if parts.scheme not in ("http", "https"):
            reason = "it starts with neither http:// nor https://"
        elif not parts.hostname:
            reason = "it has no host"
        elif "@" in parts.netloc:
            reason = "it contains a user name"
        elif parts.port == 0:
            reason = "port 0 is not valid"
        elif any(char.isspace() or not char.isprintable() for char in url):
            reason = "it contains spaces or characters that cannot be printed"
    except ValueError as error:
        reason = str(error)
    if reason:
        raise UsageError(
            f"{name} {redact_url(url)!r}: {reason}; give http://HOST[:PORT]/PATH or https://HOST[:PORT]/PATH"
        )
