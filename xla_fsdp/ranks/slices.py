"""The slices that the ranks of a launch are on: of TPUs, simulated on CPU ranks, or pretended."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch_xla.runtime as xr

from .. import xlac
from ..tpu.slices import (
    COUNT,
    PORT,
    VARIABLES,
    Groups,
    PlaceAmongSlices,
    place_among_slices,
    ranks_by_slice,
)
from .rank import current_rank

#: As many slices there are, where ``launch`` is not told: simulated on CPU ranks, checked on TPUs.
EXPECTED = "XLA_FSDP_SLICES"


def slices_of_ranks() -> Groups:
    """Ordinals of the ranks of each slice, or ``()`` where all are on one.

    Within a plan those of the slices that are planned for.
    """
    context = current_rank()
    if context is not None:
        return context.slices
    ranks = xr.world_size()
    found = ranks_by_slice(xr.global_runtime_device_attributes()) if ranks > 1 else ()
    # A process that nobody launched is one rank, though it sees all devices.
    return found if sum(map(len, found)) == ranks else ()


def place() -> PlaceAmongSlices | None:
    """Which of several slices this host is on, or ``None`` for a slice alone, and on a CPU.

    Raises:
        ValueError: what the environment and the machine's metadata say does not fit together.
    """
    if os.environ.get("PJRT_DEVICE", "").split("_")[0] != "TPU":
        return None
    try:
        # Where there is metadata it is YAML, in which numbers are numbers.
        found = dict(xlac.host_metadata())
        metadata = {name: str(value) for name, value in found.items() if value is not None}
    except Exception:  # whatever requests or yaml raise where there is none
        metadata = {}
    said = {name: os.environ.get(name) or metadata.get(name, "") for name in VARIABLES}
    return place_among_slices(said)


def number_of_slices(asked: int | None, ranks: int) -> int:
    """How many slices ``ranks`` CPU ranks are to simulate; ``asked``: ``slices`` of ``launch``.

    Raises:
        ValueError, TypeError: they do not divide, or are no number.
    """
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


def require_slices(asked: int | None, found: PlaceAmongSlices | None) -> None:
    """Raises a ValueError if there are not as many TPU slices as ``slices`` of ``launch``, or the
    environment, says: alone each would save over the others."""
    name, value = _expected(asked)
    count = found.count if found else 1
    if value is not None and value != count:
        told = f"{COUNT}={count}" if found else f"{COUNT} is not set, or 1"
        raise ValueError(
            f"{name}={value}, but {told}: on a TPU leave {name} out, or see to it that every host "
            f"has {', '.join(VARIABLES)} of {value} slices"
        )


def _expected(asked: int | None) -> tuple[str, int | None]:
    """The number of slices that was asked for, and by what name."""
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int):
            raise TypeError(f"slices must be a number of slices or None, got {asked!r}")
        return "slices", asked
    given = os.environ.get(EXPECTED, "").strip()
    if given and not given.isdecimal():
        raise ValueError(f"{EXPECTED}={given!r} must be a number of slices, from 1 on")
    return EXPECTED, int(given) if given else None


def prepare_host(found: PlaceAmongSlices | None) -> None:
    """Sets what the processes that this one starts need on several slices."""
    if found is not None:
        # torch_xla looks for the first rank's host among those of its own slice.
        os.environ.setdefault("MASTER_ADDR", found.coordinator)


def prepare_process(local_rank: int) -> None:
    """Gives this process of a host a port of its own for what goes between slices, before XLA's
    runtime starts. torch_xla does so for what goes within a slice only."""
    found = place()
    if local_rank > 0 and found is not None:
        os.environ[PORT] = str(found.port + local_rank)


class OnAllSlices:
    """``fn``, to be run as ranks of several slices, in processes that torch_xla starts."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In the new process, which learns its number on the host when torch_xla calls this.
        vars(self).update(state)
        configure = xlac.configure_process.value
        if not isinstance(configure, _Configuring):
            xlac.configure_process.value = _Configuring(configure)

    def __call__(self, rank: int, *args: Any) -> Any:
        require_all_slices()
        return self.fn(rank, *args)


class _Configuring:
    def __init__(self, configure: Callable) -> None:
        self.configure = configure

    def __call__(self, local_rank: int, *args: Any, **kwargs: Any) -> Any:
        prepare_process(local_rank)
        return self.configure(local_rank, *args, **kwargs)


def require_all_slices() -> None:
    """Raises a RuntimeError if the runtime of this rank has not joined the slices that its host was
    told of: each would train on its own, and save over what the others have saved."""
    told, found = place(), slices_of_ranks()
    expected, seen = (told.count if told else 1), max(len(found), 1)
    if expected != seen:
        raise RuntimeError(
            f"{COUNT}={expected}, but the XLA runtime of this process is on {seen} slice"
            f"{'s' if seen > 1 else ''}, with {xr.world_size()} ranks: libtpu has joined others "
            f"than the host was told of. Set {', '.join(VARIABLES)} before anything uses XLA, the "
            "same for every process of a host but the port"
        )
