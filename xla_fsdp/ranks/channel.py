"""A key-value store that all ranks share, for messages outside of their XLA programs.

For processes, the launcher of the first host or torchrun's agent serves it over TCP. It works while
a device hangs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
import torch_xla.runtime as xr

from .. import xlac
from ..wording import first_line
from .rank import current_rank, is_simulated_rank
from .slices import multislice_config

# "HOST:PORT", for the processes that a launcher starts.
_ADDRESS = "XLA_FSDP_STORE"
# torch_xla's rendezvous uses port 12355, libtpu the ports from 8471 on.
_PORT_VARIABLE, _PORT = "XLA_FSDP_STORE_PORT", 12377
_SECONDS_TO_CONNECT = 60.0
# Channels by rank and use: TPU v2 and v3 have two ranks in one process.
_numbers = defaultdict[str, Iterator[int]](itertools.count)


@dataclass(frozen=True)
class Channel:
    """A store with separate keys for each use; ``distant``: queries go over a network."""

    rank: int
    size: int
    store: dist.Store
    distant: bool


def open_channel(use: str, place: tuple[int, int] | None = None) -> Channel:
    """Opens a channel between all ranks of the launch, without waiting for other ranks.

    The n-th channel for ``use`` on one rank is connected to the n-th on every other. ``place``:
    rank and number of ranks, if this is not the rank's thread. Raises RuntimeError without a store.
    """
    if is_simulated_rank():
        return Channel(0, 1, dist.HashStore(), False)
    context = current_rank()
    if context is not None:
        own = dist.PrefixStore(f"{use}/{context.number_of(use)}", context.store)
        return Channel(context.rank, context.size, own, False)
    rank, size = place or (xr.global_ordinal(), xr.world_size())
    own = dist.PrefixStore(f"{use}/{next(_numbers[f'{rank}/{use}'])}", _connect(size))
    return Channel(rank, size, own, not isinstance(_connect(size), dist.HashStore))


@contextlib.contextmanager
def served() -> Iterator[None]:
    """A context in which processes that this one starts have a store.

    The launcher of every host calls it. If the port is not free, it warns and there is no store.
    """
    hosts, number = _hosts()
    host, port = hosts[0], _port() if len(hosts) > 1 else 0
    server = None
    if number == 0:
        try:
            server = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            warnings.warn(
                f"the store that ranks share could not start at port {port} "
                f"({first_line(error)}). Without it, ranks cannot save together on preemption, nor "
                f"report which rank hangs. Set {_PORT_VARIABLE} to a free port, the same on every "
                "host",
                stacklevel=2,
            )
            yield
            return
        port = server.port
    os.environ[_ADDRESS] = f"{host}:{port}"
    try:
        yield
    finally:
        del os.environ[_ADDRESS], server


def _port() -> int:
    text = os.environ.get(_PORT_VARIABLE, "").strip()
    if text and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise ValueError(
            f"{_PORT_VARIABLE}={text!r} must be a port, a number from 1 to 65535, the same on "
            f"every host; unset it for {_PORT}"
        )
    return int(text or _PORT)


def _hosts() -> tuple[list[str], int]:
    """Addresses of the hosts, first the one with the store, and the index of this host."""
    if xr.device_type() != "TPU":
        return ["localhost"], 0
    try:
        hosts, number = xlac.addresses_of_hosts(), xlac.number_of_host()
    except Exception:  # no metadata: a single host
        return ["localhost"], 0
    # With several slices, every host has this address.
    found = multislice_config()
    if found is not None:
        return [found.coordinator, *hosts], 0 if found.number == number == 0 else 1
    return hosts, number if len(hosts) > 1 else 0


@functools.cache
def _connect(size: int) -> dist.Store:
    address, within = os.environ.get(_ADDRESS), timedelta(seconds=_SECONDS_TO_CONNECT)
    attempt = ""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if address is None:
        if size == 1:
            return dist.HashStore()
        raise RuntimeError(
            f"these {size} ranks have no store that they share, because nothing in their "
            "environment has its address. Start the ranks with xla_fsdp.launch or torchrun"
        )
    host, _, port = address.rpartition(":")
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=within)
    except (RuntimeError, OSError, ValueError) as error:
        raise RuntimeError(
            f"the store of the ranks at {address} does not answer "
            f"({first_line(error, 200)}). Open that port between the hosts, or set "
            f"{_PORT_VARIABLE} to an open port, the same on every host"
        ) from error
    return dist.PrefixStore(f"xla_fsdp/{attempt}", store)
