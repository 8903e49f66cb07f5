"""Check names of slices on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import xla_fsdp
from xla_fsdp.tpu.topology import resolve


def require_slices(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Exit with one line and code 2 if one of ``names`` is not a slice."""
    try:
        for name in names:
            resolve(name)
    except xla_fsdp.UnknownTopologyError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
