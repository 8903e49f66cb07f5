"""Which of several TPU slices a process is on, and which ranks are on which.

libtpu reads four ``MEGASCALE_`` variables. With one missing, it waits for ever, or each slice
trains on its own, so inconsistent ones raise ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COUNT, NUMBER = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
COORDINATOR, PORT = "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_PORT"
VARIABLES = (COUNT, NUMBER, COORDINATOR, PORT)

# jax, AXLearn: "set to 8080 in multislice".
DEFAULT_PORT = 8080

# Ordinals of the ranks of each group.
Groups = tuple[tuple[int, ...], ...]

_REMEDY = (
    "GKE sets all of them in a JobSet with one replicated job of as many replicas as there are "
    "slices, a queued resource with --node-count in the machines' metadata; or unset "
    f"{', '.join(VARIABLES)} for a slice alone"
)


@dataclass(frozen=True)
class MultisliceConfig:
    """This process is on slice ``number`` of ``count``.

    ``coordinator``: the first host of slice 0. ``port``: of each host, for the other slices.
    """

    count: int
    number: int
    coordinator: str
    port: int = DEFAULT_PORT


def read_multislice_config(said: Mapping[str, str]) -> MultisliceConfig | None:
    """The place that the variables ``said`` describe, or None for one slice. Raises ValueError."""
    given = {name: said[name].strip() for name in VARIABLES if said.get(name, "").strip()}
    count = given.get(COUNT)
    if count is None:
        for name in (NUMBER, COORDINATOR):
            if given.get(name, "0") != "0":  # a single slice is number 0
                raise ValueError(
                    f"{name}={given[name]!r} says that there are several slices, but {COUNT} is "
                    f"not set: {_REMEDY}"
                )
        return None
    if not _is_number(count, 1, 100_000):
        raise ValueError(f"{COUNT}={count!r} must be a number from 1 on: {_REMEDY}")
    slices = int(count)
    if slices == 1:  # one slice of several can run alone
        return None
    for name in (NUMBER, COORDINATOR):
        if name not in given:
            raise ValueError(f"{COUNT}={slices}, but {name} is not set: {_REMEDY}")
    number = given[NUMBER]
    if not _is_number(number, 0, slices):
        raise ValueError(
            f"{NUMBER}={number!r} must be a number from 0 to {slices - 1}, as {COUNT}={slices}: "
            f"each slice has another one, and all hosts of a slice the same. {_REMEDY}"
        )
    port = given.get(PORT, str(DEFAULT_PORT))
    if not _is_number(port, 1, 1 << 16):
        raise ValueError(f"{PORT}={port!r} must be a port, a number from 1 to 65535")
    return MultisliceConfig(slices, int(number), _host_of_address(given[COORDINATOR]), int(port))


def _host_of_address(address: str) -> str:
    plain = address.rpartition("//")[2]  # grpc names: dns:///host:port
    host, _, port = plain.rpartition(":") if ":" in plain else (plain, "", "")
    is_host = re.fullmatch(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", host)
    if not is_host or (port and not _is_number(port, 1, 1 << 16)):
        raise ValueError(
            f"{COORDINATOR}={address!r} must be HOST or HOST:PORT, the first host of slice 0, the "
            f"same on all slices. {_REMEDY}"
        )
    return host


def _is_number(text: str, low: int, end: int) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and low <= int(text) < end


def ranks_by_slice(attributes: Sequence[Mapping[str, object]]) -> Groups:
    """Ordinals of the ranks of each slice, in order, or ``()`` if there are not several.

    ``attributes``: ``global_runtime_device_attributes``: ``{"name": "TPU:5", "slice_index": 1,
    ...}``.
    """
    found: dict[int, list[int]] = {}
    for one in attributes:
        ordinal = re.search(r"\d+$", str(one.get("name", "")))
        if ordinal is None or "slice_index" not in one:
            return ()
        found.setdefault(int(str(one["slice_index"])), []).append(int(ordinal[0]))
    if len(found) < 2:
        return ()
    return tuple(tuple(sorted(found[index])) for index in sorted(found))


def equal_parts(ranks: int, slices: int) -> Groups:
    """As :func:`ranks_by_slice`, of ranks that follow one another slice by slice."""
    if slices < 2:
        return ()
    each = ranks // slices
    return tuple(tuple(range(first, first + each)) for first in range(0, each * slices, each))
