"""What may run before what: the only place that emits optimization barriers.

XLA is free to hoist a gather to the start of the program (all parameters in memory at once) and to
merge the gather of the forward with that of the backward (parameters kept in between). A barrier
that ties the shards to a tensor prevents both: nothing behind it starts before that tensor exists.

Which tensor is the whole of prefetching. Tied to what the unit *before* started from, a gather may
run while that unit computes; tied to the unit's own start, it cannot. A program is traced before it
runs, so the units' order need not be known in advance.

Gathers are also tied one to the next. The links carry one at a time anyway, and left alone the
compiler starts those first that are waited for last.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import xlac
from ..ranks.rank import current_rank
from .host_data import as_data

# What a scalar can stand in for.
_CAN_WAIT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BackwardPrefetch(enum.Enum):
    """When the parameters of the next unit of a backward are gathered."""

    BACKWARD_PRE = "pre"  # beside the gradients of the unit before: two units are full at a time
    BACKWARD_POST = "post"  # after them, beside their reduction


class Event(enum.Enum):
    """What the collectives and the inputs of an FSDP unit may wait for."""

    INPUTS = "inputs"  # what a unit's forward starts from
    GRADIENT = "gradient"  # what a unit's backward starts from
    RECOMPUTATION = "recomputation"  # what a unit's recomputation starts from
    REDUCTIONS = "reductions"  # the reduced gradients of a unit
    GATHER = "gather"  # a gather, of whichever unit


@dataclass(frozen=True)
class Wait:
    """Waits for the ``event`` of the unit that came ``before`` units (or gathers) earlier; 0: of
    this one."""

    event: Event
    before: int


def waits_of_forward(prefetch: bool) -> tuple[Wait, ...]:
    """What the gathers of a forward wait for."""
    return (Wait(Event.INPUTS, 1 if prefetch else 0),)


def waits_of_backward(prefetch: BackwardPrefetch | None, limit: bool) -> tuple[Wait, ...]:
    """What the gathers of a backward wait for.

    ``limit``: also for the reductions of the unit two before (without prefetch: one before, too),
    so that full gradients of at most two units exist.
    """
    early = prefetch is BackwardPrefetch.BACKWARD_PRE
    waits = [Wait(Event.GRADIENT, 1 if early else 0)]
    if limit:
        waits.append(Wait(Event.REDUCTIONS, 2))
        if prefetch is None:
            waits.append(Wait(Event.REDUCTIONS, 1))
    return tuple(waits)


# What the inputs of a recomputation wait for before they come back from the host: they travel while
# the one before computes, and those of at most two units are there.
WAITS_OF_RECOMPUTATION = (Wait(Event.RECOMPUTATION, 1), Wait(Event.REDUCTIONS, 2))

# What a unit starts from: where there is no unit before, things wait for the unit's own.
_STARTS = (Event.INPUTS, Event.GRADIENT, Event.RECOMPUTATION)
# How far back something may wait for.
_BACK = 2


class Order:
    """The events of the units of one model so far, in the step that is being traced.

    Lifetime: what it holds are the inputs and gradients of the last unit or two, and only until the
    forward or backward under way is over: a tensor that is held when the program runs becomes an
    output of it.
    """

    def __init__(self) -> None:
        # The newest first.
        self._events: dict[Event, list[Sequence[torch.Tensor]]] = {}
        # Says that the inputs that the last forward sent to the host are there.
        self._on_host: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict) -> Order:
        """A copy of a model is not under way."""
        return memo.setdefault(id(self), Order())

    def start_forward(
        self, inputs: Sequence[torch.Tensor], waits: Sequence[Wait]
    ) -> list[torch.Tensor]:
        """A unit's forward starts from ``inputs``. Returns the tensors that ``waits`` name."""
        self._add(Event.INPUTS, inputs)
        return self._named(waits)

    def start_backward(
        self, grads: Sequence[torch.Tensor], waits: Sequence[Wait]
    ) -> list[torch.Tensor]:
        """A unit's backward starts from ``grads``. Returns the tensors that ``waits`` name."""
        self._add(Event.GRADIENT, grads)
        self._add(Event.REDUCTIONS, [])
        return self._named(waits)

    def start_recomputation(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """A recomputation starts from ``grad``. Returns what its inputs wait for that are on the
        host."""
        self._add(Event.RECOMPUTATION, [grad])
        return self._named(WAITS_OF_RECOMPUTATION)

    @property
    def arrived(self) -> Sequence[torch.Tensor]:
        """What the last unit's backward started from."""
        return self._named([Wait(Event.GRADIENT, 0)])

    def offload(self, arrived: torch.Tensor) -> torch.Tensor | None:
        """What a forward waits for whose inputs go to the host: that those of the one before are
        there. ``arrived`` says it of its own."""
        before, self._on_host = self._on_host, arrived
        return before

    def delay(self, shard: torch.Tensor, wait: Wait | None = None) -> torch.Tensor:
        """``shard``, not before a gather is over: that of ``wait``, by default the last one."""
        events = self._named([wait or Wait(Event.GATHER, 0)])
        if not events or shard.dtype not in _CAN_WAIT:
            return shard
        return torch.where(events[0], 0.0, shard)

    def add_gather(self, full: torch.Tensor) -> None:
        """``full`` came out of a gather."""
        # False whatever the value, NaN too, but only the program that runs knows. Not a barrier:
        # the TPU compiler drops those that tie one large tensor to a small one.
        self.last = torch.slice_copy(full.view(-1), 0, 0, 1) > math.inf

    @property
    def last(self) -> torch.Tensor | None:
        """Made of the result of the last gather; setting it adds a gather."""
        events = self._named([Wait(Event.GATHER, 0)])
        return events[0] if events else None

    @last.setter
    def last(self, event: torch.Tensor | None) -> None:
        self._add(Event.GATHER, [] if event is None else [event])

    def add_reductions(self, shards: Sequence[torch.Tensor]) -> None:
        """``shards`` are gradient shards of the unit whose backward ends."""
        kept = self._events.setdefault(Event.REDUCTIONS, [[]])
        kept[0] = [*kept[0], *shards]

    def end_forward(self) -> None:
        """The outermost forward ended, or will not end."""
        self._forget(Event.INPUTS, Event.GATHER)

    def end_backward(self) -> None:
        """A backward ended, or will not end."""
        # Also what forwards left: a recomputation may have checkpointed modules in it.
        self._forget(Event.GRADIENT, Event.REDUCTIONS, Event.RECOMPUTATION, Event.GATHER)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return self._on_host is None and not any(
            one for kept in self._events.values() for one in kept
        )

    def _forget(self, *events: Event) -> None:
        for event in events:
            self._events.pop(event, None)
        self._on_host = None

    def _add(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        self._events[event] = [tensors, *self._events.get(event, [])[:_BACK]]

    def _named(self, waits: Sequence[Wait]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for wait in waits:
            kept = self._events.get(wait.event, [])
            tensors = kept[wait.before] if wait.before < len(kept) else []
            if not tensors and wait.event in _STARTS and kept:
                tensors = kept[0]
            found += tensors
        return found


def after(tensors: Sequence[torch.Tensor], events: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of ``tensors`` that exist only once all ``events`` do; the arguments stay as they are.

    A barrier replaces what it is given. Applied to a parameter itself it would make the parameter
    an output of every step, so it is applied to copies; the compiler removes those.
    """
    tied = [torch.view_copy(tensor, tensor.shape) for tensor in tensors]
    if tied and events:
        xlac.optimization_barrier_(tied + [torch.view_copy(event, event.shape) for event in events])
    return tied


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor``, computed in no other operation than this.

    If gradients are enabled, they go through the copy to ``tensor``.
    """
    copy = torch.view_copy(tensor, tensor.shape)
    xlac.optimization_barrier_([copy])
    return copy


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which the compiler may not compute again instead of keeping it in memory."""
    return _Kept.apply(tensor)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return apart(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@contextlib.contextmanager
def separate_collectives(device: torch.device) -> Iterator[None]:
    """Collectives traced within wait for none from before, and none afterwards for them."""
    rank = current_rank()
    order = None if rank is None else rank.order
    token = xlac.collective_token(str(device))
    xlac.set_collective_token(str(device), None)
    try:
        if order is None:
            yield
        else:
            with order.apart(lambda: as_data(torch.tensor(False), device)):
                yield
    finally:
        xlac.set_collective_token(str(device), token)
