"""How the ranks of a save or load agree: all succeed, or all raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from ..collectives.random_state import preserve_random_state
from ..consolidate.errors import MetadataMismatchError, OtherRankError

T = TypeVar("T")


class Meeting:
    """All ranks of the launch. Its methods must be called on every rank, in the same order."""

    def __init__(self) -> None:
        self.rank = xr.global_ordinal()
        self.size = xr.world_size()

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything that JSON can express), by rank."""
        if self.size == 1:
            return [value]
        # As ASCII: a path may have characters that UTF-8 cannot express.
        own = json.dumps([self.rank, value]).encode("ascii")
        # On TPU every length of payload is a program of its own: few lengths.
        own = own.ljust(1 << max(8, (len(own) - 1).bit_length()))
        with preserve_random_state():
            payloads = xm.rendezvous(f"xla_fsdp checkpoint: {what}", own)
        found = dict(json.loads(bytes(payload)) for payload in payloads)
        return [found[rank] for rank in range(self.size)]

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """What ``work`` returned on every rank, by rank.

        Raises:
            OtherRankError: it raised on another rank. Where it raised on this one, that exception.
        """
        own: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as error:
            own = error
        outcomes = self.gather(what, [result, None] if own is None else [None, describe(own)])
        if own is not None:
            raise own
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise OtherRankError(f"rank {rank} could not {what}: {failure}")
        return [value for value, _ in outcomes]

    def each(self, what: str, work: Callable[[], T]) -> T:
        """What ``work`` returned on this rank; errors as in :meth:`together`."""
        own: list[T] = []
        self.together(what, lambda: own.append(work()))
        return own[0]

    def alike(self, what: str, work: Callable[[], Any], differ: str) -> None:
        """Sees to it that ``work`` returns the same on every rank; errors as in :meth:`together`.

        Raises:
            MetadataMismatchError: it does not; ``differ`` with the first such rank for ``{rank}``.
        """
        values = self.together(what, work)
        for rank, value in enumerate(values):
            if value != values[0]:
                raise MetadataMismatchError(differ.format(rank=rank))

    def first(self, what: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns on rank 0, which alone does it; errors as in :meth:`together`."""
        return self.together(what, work if self.rank == 0 else lambda: None)[0]


def describe(error: Exception) -> str:
    """One line for other ranks to read."""
    text = " ".join(str(error).splitlines())
    return f"{type(error).__name__}: {text:.500}" if text else type(error).__name__
