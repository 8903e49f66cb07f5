"""What ranks tell each other beside their programs: a store of keys and values for all of them.

Where ranks are threads it is in memory. Where they are processes one process serves it over TCP:
the one that launched the ranks of the first host, or torchrun's agent. It works while a device or a
collective hangs, and nothing of it is in any program.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
import torch_xla.runtime as xr

from .. import xlac
from ..wording import first_line
from .rank import current_rank, is_pretending
from .slices import place

# "HOST:PORT" of the store, for the processes that a launcher starts.
_ADDRESS = "XLA_FSDP_STORE"
# Where launchers of several hosts serve it. torch_xla's own rendezvous takes 12355, libtpu 8471 on.
_PORT_VARIABLE, _PORT = "XLA_FSDP_STORE_PORT", 12377
_SECONDS_TO_CONNECT = 60.0


@dataclass(frozen=True)
class Channel:
    """A store that ranks share, and the caller's place among them.

    Attributes:
        rank: the caller's, ``0 <= rank < size``.
        size: how many ranks there are.
        store: of this use alone; another one has other keys.
        distant: whether asking it goes over a network, and so should be done now and then only.
    """

    rank: int
    size: int
    store: dist.Store
    distant: bool


def open_channel(use: str, place: tuple[int, int] | None = None) -> Channel:
    """A channel between all ranks of the launch; the n-th for ``use`` on one rank is the n-th on
    each other. Waits for nobody. ``place``: rank and size, where that is not the rank's thread.

    Raises:
        RuntimeError: the ranks have no store, or it does not answer.
    """
    if is_pretending():  # as a rank of a slice that is not there: nobody else is, either
        return Channel(0, 1, dist.HashStore(), False)
    context = current_rank()
    if context is not None:
        own = dist.PrefixStore(f"{use}/{context.number_of(use)}", context.store)
        return Channel(context.rank, context.size, own, False)
    rank, size = place or (xr.global_ordinal(), xr.world_size())
    number = _process.number_of(f"{rank}/{use}")
    shared, distant = _process.store(size)
    return Channel(rank, size, dist.PrefixStore(f"{use}/{number}", shared), distant)


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Within, processes that this one starts have a store. Called by the launcher of every host.

    Without a free port there is none, and a warning.
    """
    hosts, number = _hosts()
    host, port = hosts[0], int(os.environ.get(_PORT_VARIABLE, _PORT)) if len(hosts) > 1 else 0
    server = None
    if number == 0:
        try:
            server = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            warnings.warn(
                f"ranks can tell each other nothing beside their programs, and so not agree on a "
                f"step to save when their machine is taken away, nor find out which one hangs: no "
                f"store at port {port} "
                f"({first_line(error)}); set {_PORT_VARIABLE} to a free one on every host",
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


def _hosts() -> tuple[list[str], int]:
    """Addresses of the hosts, the one with the store first, and which of them this one is."""
    if os.environ.get("PJRT_DEVICE", "").split("_")[0] != "TPU":
        return ["localhost"], 0
    try:
        hosts, number = xlac.addresses_of_hosts(), xlac.number_of_host()
    except Exception:  # whatever requests or yaml raise where there is no metadata: a host alone
        return ["localhost"], 0
    # Several slices: the first host of the first one, which all have to know already.
    found = place()
    if found is not None:
        return [found.coordinator, *hosts], 0 if found.number == number == 0 else 1
    return hosts, number if len(hosts) > 1 else 0


class _Process:
    """The store of a process whose ranks are not threads of a CPU launch: one connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: dist.Store | None = None
        self._distant = False
        self._numbers = defaultdict[str, Iterator[int]](itertools.count)

    def number_of(self, use: str) -> int:
        with self._lock:
            return next(self._numbers[use])

    def store(self, size: int) -> tuple[dist.Store, bool]:
        with self._lock:  # TPU v2 and v3 run two ranks in a process
            if self._store is None:
                self._store = _connect(size)
                self._distant = not isinstance(self._store, dist.HashStore)
            return self._store, self._distant


# Of the process by nature, as its XLA runtime is.
_process = _Process()


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
            f"these {size} ranks have no store to tell each other anything beside their programs: "
            "start them by xla_fsdp.launch, or by torchrun"
        )
    host, _, port = address.rpartition(":")
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=within)
    except (RuntimeError, OSError, ValueError) as error:
        raise RuntimeError(
            f"the store of the ranks at {address} does not answer "
            f"({first_line(error, 200)}): let hosts reach each other at that port, or set "
            f"{_PORT_VARIABLE} to one where they can, the same on every host"
        ) from error
    return dist.PrefixStore(f"xla_fsdp/{attempt}", store)
