"""Exchanges small values between the ranks of a save or load: all ranks succeed, or all raise."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from ..collectives.random_state import preserve_random_state
from ..consolidate.errors import MetadataMismatchError, OtherRankError
from ..ranks.errors import described

T = TypeVar("T")

_VISIBLE_SECONDS = 30.0


class RankExchange:
    """All ranks. Call its methods on every rank, in the same order: each is a barrier."""

    def __init__(self) -> None:
        self.rank = xr.global_ordinal()
        self.size = xr.world_size()

    def gather_values(self, what: str, value: Any) -> list[Any]:
        """Returns the ``value`` of every rank, in rank order. It must be a JSON value."""
        if self.size == 1:
            return [value]
        # A path may have characters that UTF-8 cannot encode.
        own = json.dumps([self.rank, value]).encode("ascii")
        # On TPU, each length compiles a separate program.
        own = own.ljust(1 << max(8, (len(own) - 1).bit_length()))
        with preserve_random_state():
            payloads = xm.rendezvous(f"xla_fsdp checkpoint: {what}", own)
        found = dict(json.loads(bytes(payload)) for payload in payloads)
        return [found[rank] for rank in range(self.size)]

    def run(self, what: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Calls ``work`` on every rank. Returns its result, and all ranks' second values (JSON).

        Raises OtherRankError, "rank 1 could not ``what``", if ``work`` raised on another rank only.
        """
        try:
            result, value = work()
        except Exception as error:
            self.gather_values(what, [None, describe_error(error)])
            raise
        outcomes = self.gather_values(what, [value, None])
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise OtherRankError(f"rank {rank} could not {what}: {failure}")
        return result, [value for value, _ in outcomes]

    def run_and_gather(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Returns the results (JSON values) of all ranks, in rank order. Raises as :meth:`run`."""
        return self.run(what, lambda: (None, work()))[1]

    def run_on_each_rank(self, what: str, work: Callable[[], T]) -> T:
        """Returns this rank's result, which may be any object. Raises as :meth:`run`."""
        return self.run(what, lambda: (work(), None))[0]

    def run_on_first_rank(self, what: str, work: Callable[[], Any]) -> Any:
        """Calls ``work`` on rank 0. Returns its result on every rank. Raises as :meth:`run`."""
        return self.run_and_gather(what, work if self.rank == 0 else lambda: None)[0]

    def run_and_compare(self, what: str, work: Callable[[], tuple[T, Any]], differ: str) -> T:
        """:meth:`run`, with a check that the second value is the same on every rank.

        Otherwise raises MetadataMismatchError with the text ``differ.format(rank=rank)``.
        """
        result, values = self.run(what, work)
        for rank, value in enumerate(values):
            if value != values[0]:
                raise MetadataMismatchError(differ.format(rank=rank))
        return result


def describe_error(error: Exception) -> str:
    """The type and the first 500 characters of the message, in one line."""
    kind, _, text = described(error).partition(": ")
    return f"{kind}: {' '.join(text.splitlines()):.500}" if text else kind


def wait_until(condition: Callable[[], bool]) -> bool:
    """Waits up to 30 s: a network file system shows a new file on other hosts with a delay."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    wait = 0.01
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(wait)
        wait = min(2 * wait, 1.0)
    return True
