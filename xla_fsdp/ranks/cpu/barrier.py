"""A barrier of all ranks that compares what they wait for.

If keys differ, or a rank has ended, the ranks can never continue. The timeout is only for ranks
that still run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from ..errors import CollectiveMismatchError, RankStopped, RankTimeoutError

_GRACE_SECONDS = 1.0  # from a mismatch to its report


@dataclass(frozen=True)
class Arrival:
    """The call in which one rank waits.

    Attributes:
        key: must be equal on all ranks.
        steps: the parts of ``key`` to report if keys differ, for example pending collectives.
        payload: all ranks receive it once all have arrived.
    """

    what: str
    key: Hashable
    where: str
    steps: tuple = ()
    payload: Any = None


@dataclass
class _Round:
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    payloads: list | None = None  # by rank, once complete


class Barrier:
    """``locate``: where a running rank is in user code."""

    def __init__(self, size: int, timeout: float, locate: Callable[[int], str]) -> None:
        self.size = size
        self.failure: BaseException | None = None
        self._timeout = timeout
        self._locate = locate
        self._changed = threading.Condition()
        self._meeting = _Round()
        self._first_wait: float | None = None
        self._disagreed: float | None = None

    def meet(self, rank: int, arrival: Arrival) -> list:
        """Waits until every rank has arrived with an equal key; returns all payloads by rank.

        Raises RankStopped if another rank failed, or the ranks can never all arrive.
        """
        with self._changed:
            while rank in self._meeting.arrivals and self.failure is None:
                self._changed.wait()  # another thread of the rank
            self.raise_if_stopped()
            meeting = self._meeting
            if not meeting.arrivals:
                self._first_wait = time.monotonic()
            meeting.arrivals[rank] = arrival
            if len({other.key for other in meeting.arrivals.values()}) == 1:
                if len(meeting.arrivals) == self.size:
                    meeting.payloads = [meeting.arrivals[r].payload for r in range(self.size)]
                    self._meeting = _Round()
                    self._changed.notify_all()
            elif len(meeting.arrivals) == self.size:
                self.stop_mismatched()
            elif self._disagreed is None:
                self._disagreed = time.monotonic()
            while meeting.payloads is None:
                self.raise_if_stopped()
                self._changed.wait()
            return meeting.payloads

    def raise_if_stopped(self) -> None:
        if self.failure is not None:
            raise RankStopped

    def stop(self, failure: BaseException) -> None:
        """Makes every rank stop at its next barrier; only the first failure counts."""
        with self._changed:
            if self.failure is None:
                self.failure = failure
                self._changed.notify_all()

    def stop_mismatched(self, elsewhere: Mapping[int, str] = MappingProxyType({})) -> None:
        """``elsewhere``: what the ranks wait for that are not at this barrier."""
        with self._changed:
            text = f"ranks wait for each other at different places:\n{self.places(elsewhere)}"
            difference = _first_difference(self._meeting.arrivals)
            if difference:
                text += f"\n{difference}"
            text += (
                "\nEvery rank must run the same collectives, syncs and rendezvous in the same "
                "order; on TPU this program would hang."
            )
            self.stop(CollectiveMismatchError(text))

    def waiting(self) -> set[int]:
        with self._changed:
            return set(self._meeting.arrivals)

    def watch(self) -> None:
        """Stops the ranks after the timeout or a mismatch; the launcher calls it regularly."""
        with self._changed:
            if self.failure is not None or not self._meeting.arrivals:
                return
            now = time.monotonic()
            if self._disagreed is not None and now - self._disagreed > _GRACE_SECONDS:
                self.stop_mismatched()
            elif self._first_wait is not None and now - self._first_wait > self._timeout:
                self.stop(RankTimeoutError(
                    f"ranks have waited {self._timeout:g} s (the timeout of launch) for "
                    f"a rank that did not arrive:\n{self.places()}"
                ))  # fmt: skip

    def places(self, elsewhere: Mapping[int, str] = MappingProxyType({})) -> str:
        """One line for each rank."""
        lines = []
        with self._changed:
            for rank in range(self.size):
                arrival = self._meeting.arrivals.get(rank)
                if arrival is None:
                    what = elsewhere.get(rank, "running")
                    lines.append(f"  rank {rank}: {what}, at {self._locate(rank)}")
                    continue
                line = f"  rank {rank}: {arrival.what}, at {arrival.where}"
                count = len(arrival.steps)
                if count:
                    line += f", with {count} collective{'s' * (count > 1)} pending"
                lines.append(line)
        return "\n".join(lines)


def _first_difference(arrivals: dict[int, Arrival]) -> str:
    ranks = sorted(arrivals)
    for number, steps in enumerate(zip_longest(*(arrivals[rank].steps for rank in ranks)), 1):
        if len({getattr(step, "key", step) for step in steps}) > 1:
            lines = [f"The first collective that differs is number {number}:"]
            for rank, step in zip(ranks, steps, strict=True):
                lines.append(f"  rank {rank}: {step if step is not None else 'none'}")
            return "\n".join(lines)
    return ""
