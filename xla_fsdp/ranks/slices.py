"""The slices of the ranks of a launch: TPU slices, or simulated by CPU ranks or a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch_xla.runtime as xr

from .. import xlac
from ..tpu.slices import (
    COUNT,
    PORT,
    VARIABLES,
    Groups,
    MultisliceConfig,
    ranks_by_slice,
    read_multislice_config,
)
from .rank import current_rank

#: The number of slices if ``launch`` gets none; on TPUs it is checked.
EXPECTED = "XLA_FSDP_SLICES"


def slices_of_ranks() -> Groups:
    """Ordinals of the ranks of each slice, in a plan the planned ones; ``()`` for one slice."""
    context = current_rank()
    if context is not None:
        return context.slices
    ranks = xr.world_size()
    found = ranks_by_slice(xr.global_runtime_device_attributes()) if ranks > 1 else ()
    # A process that was not launched is one rank, although it sees all devices.
    return found if sum(map(len, found)) == ranks else ()


def multislice_config() -> MultisliceConfig | None:
    """This host's place among several slices; ``None`` for one slice, and on a CPU.

    Raises ValueError if the environment and the machine's metadata contradict each other.
    """
    if xr.device_type() != "TPU":
        return None
    try:
        metadata = dict(xlac.host_metadata())
    except Exception:  # there is none
        metadata = {}
    # YAML, in which some values are numbers.
    found = {name: os.environ.get(name) or metadata.get(name) for name in VARIABLES}
    return read_multislice_config({n: "" if v is None else str(v) for n, v in found.items()})


def number_of_slices(asked: int | None, ranks: int) -> int:
    """The number that ``ranks`` CPU ranks simulate; raises unless it divides them."""
    name, value = _expected(asked)
    if value is None:
        return 1
    if value < 1 or ranks % value:
        allowed = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ValueError(
            f"{name}={value} does not divide {ranks} ranks into slices of equal size; allowed are "
            f"{allowed}"
        )
    return value


def require_slices(asked: int | None, found: MultisliceConfig | None) -> None:
    """Raises ValueError if the number of TPU slices is not the expected one."""
    name, value = _expected(asked)
    count = found.count if found else 1
    if value is not None and value != count:
        setting = f"{COUNT}={count}" if found else f"{COUNT} is not set, or 1"
        raise ValueError(
            f"{name}={value}, but {setting}. On a TPU leave {name} out, or set on every host "
            f"{', '.join(VARIABLES)} for {value} slices"
        )


def _expected(asked: int | None) -> tuple[str, int | None]:
    """Name and value of the setting."""
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int):
            raise TypeError(f"slices must be a number of slices or None, got {asked!r}")
        return "slices", asked
    given = os.environ.get(EXPECTED, "").strip()
    if given and not given.isdecimal():
        raise ValueError(f"{EXPECTED}={given!r} must be a number of slices, from 1 on")
    return EXPECTED, int(given) if given else None


def prepare_host(found: MultisliceConfig | None) -> None:
    if found is not None:
        # torch_xla searches for the first rank's host only among the hosts of the same slice.
        os.environ.setdefault("MASTER_ADDR", found.coordinator)


def prepare_process(local_rank: int) -> None:
    """Sets the port for communication between slices; call it before XLA's runtime starts."""
    found = multislice_config()
    if local_rank > 0 and found is not None:
        os.environ[PORT] = str(found.port + local_rank)


class OnAllSlices:
    """Calls ``fn`` as ranks of several slices, in processes that torch_xla starts."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Runs in the new process, before torch_xla calls this with the local rank.
        vars(self).update(state)
        configure = xlac.configure_process.value
        if getattr(configure, "func", None) is not _configure_process:
            xlac.configure_process.value = partial(_configure_process, configure)

    def __call__(self, rank: int, *args: Any) -> Any:
        require_all_slices()
        return self.fn(rank, *args)


def _configure_process(original: Callable, local_rank: int, *args: Any, **kwargs: Any) -> Any:
    prepare_process(local_rank)
    return original(local_rank, *args, **kwargs)


def require_all_slices() -> None:
    """Raises RuntimeError if this rank's runtime has not joined all expected slices.

    Slices that are not connected would overwrite each other's checkpoints.
    """
    own, found = multislice_config(), slices_of_ranks()
    expected, seen = (own.count if own else 1), max(len(found), 1)
    if expected != seen:
        raise RuntimeError(
            f"{COUNT}={expected}, but the XLA runtime of this process is on {seen} slice"
            f"{'s' if seen > 1 else ''}, with {xr.world_size()} ranks: libtpu has joined other "
            f"slices. Set {', '.join(VARIABLES)} before anything uses XLA, with equal values for "
            "every process of a host, except for the port"
        )
