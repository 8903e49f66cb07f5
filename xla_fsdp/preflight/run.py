"""The order of the checks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from .api import DISCOVERY_URL, TpuApi, wait_until_usable
from .checks import Check, failed, skipped
from .errors import ApiError, UsageError
from .node import Node
from .node_checks import Expected, check_node, slice_of
from .shared_path import check_shared_path
from .template import Template
from .trouble import shown
from .versions import check_versions
from .where import Where, find_where
from .worker_checks import check_answers, check_looks
from .workers import Workers


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Check]:
    """Yields each check as soon as it is made; ``options`` are those of :mod:`.cli`.

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
