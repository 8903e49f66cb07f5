"""The order of collectives and computations: the only module that emits optimization barriers.

Without a barrier from shards to a tensor, XLA may gather all units at the start, or merge gathers
of forward and backward. The choice of the tensor implements prefetching. Gathers are tied to each
other: otherwise the compiler starts those first whose results are needed last.
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

# A scalar can replace a tensor of these to wait for.
_CAN_WAIT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BackwardPrefetch(enum.Enum):
    """When the full parameters of the next unit are gathered in a backward."""

    BACKWARD_PRE = "pre"  # overlapped with the previous unit's backward: two units are full
    BACKWARD_POST = "post"  # after that, overlapped with the reduction of its gradients


class Event(enum.Enum):
    """What collectives and inputs of a unit may wait for."""

    INPUTS = "inputs"  # of a unit's forward
    GRADIENT = "gradient"  # that starts a unit's backward
    RECOMPUTATION = "recomputation"  # the gradient that starts a unit's recomputation
    REDUCTIONS = "reductions"
    GATHER = "gather"


@dataclass(frozen=True)
class Wait:
    """Waits for ``event`` of the unit (or gather) ``before`` places earlier; 0: of this one."""

    event: Event
    before: int


# Inputs are copied from the host while the previous recomputation runs, for two units at most.
WAITS_OF_RECOMPUTATION = (Wait(Event.RECOMPUTATION, 1), Wait(Event.REDUCTIONS, 2))

# Without an earlier unit, waits for these use the unit's own event.
_STARTS = (Event.INPUTS, Event.GRADIENT, Event.RECOMPUTATION)
# The largest ``before`` of a wait.
_BACK = 2


class Order:
    """The events so far of the units of one model, in the step that is being traced.

    It refers to tensors only until the forward or backward ends: a tensor that is referenced when
    the program runs becomes an output.
    """

    def __init__(self) -> None:
        # The newest first.
        self._events: dict[Event, list[Sequence[torch.Tensor]]] = {}
        # Depends on the arrival on the host of the inputs that the last forward offloaded.
        self._on_host: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict) -> Order:
        """A copied model has no current forward or backward."""
        return memo.setdefault(id(self), Order())

    def start(
        self, event: Event, tensors: Sequence[torch.Tensor], waits: Sequence[Wait]
    ) -> list[torch.Tensor]:
        """Records that a unit starts from ``tensors``; returns what ``waits`` name."""
        self._add(event, tensors)
        if event is Event.GRADIENT:
            self._add(Event.REDUCTIONS, [])
        return self._named(waits)

    @property
    def arrived(self) -> Sequence[torch.Tensor]:
        """The gradients that started the last unit's backward."""
        return self._named([Wait(Event.GRADIENT, 0)])

    def offload(self, arrived: torch.Tensor) -> torch.Tensor | None:
        """Records ``arrived``, which depends on offloaded inputs; returns the previous one."""
        before, self._on_host = self._on_host, arrived
        return before

    def delay(self, shard: torch.Tensor, wait: Wait | None = None) -> torch.Tensor:
        """``shard``, tied to the end of the gather of ``wait``, by default the last."""
        events = self._named([wait or Wait(Event.GATHER, 0)])
        if not events or shard.dtype not in _CAN_WAIT:
            return shard
        return torch.where(events[0], 0.0, shard)

    def add_gather(self, full: torch.Tensor) -> None:
        # Slices, because libtpu 0.0.51 would copy the entire tensor to view it as one dimension.
        for dim in range(full.dim()):
            full = torch.slice_copy(full, dim, 0, 1)
        # Always False. The TPU compiler drops barriers that tie a large tensor to a small one.
        self.last = full.view(-1) > math.inf

    @property
    def last(self) -> torch.Tensor | None:
        """A tensor computed from the result of the last gather; setting it adds a gather."""
        events = self._named([Wait(Event.GATHER, 0)])
        return events[0] if events else None

    @last.setter
    def last(self, event: torch.Tensor | None) -> None:
        self._add(Event.GATHER, [] if event is None else [event])

    def add_reductions(self, shards: Sequence[torch.Tensor]) -> None:
        kept = self._events.setdefault(Event.REDUCTIONS, [[]])
        kept[0] = [*kept[0], *shards]

    def end_forward(self) -> None:
        self._forget(Event.INPUTS, Event.GATHER)

    def end_backward(self) -> None:
        # Also those of forwards: a recomputation may contain checkpointed modules.
        self._forget(Event.GRADIENT, Event.REDUCTIONS, Event.RECOMPUTATION, Event.GATHER)

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
    """Copies of ``tensors`` that exist only after all ``events`` do.

    A barrier replaces its tensors: a parameter itself would become an output of every step.
    """
    tied = [torch.view_copy(tensor, tensor.shape) for tensor in tensors]
    if tied and events:
        xlac.optimization_barrier_(tied + [torch.view_copy(event, event.shape) for event in events])
    return tied


def prevent_fusion(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is not fused with other operations; gradients go through it."""
    copy = torch.view_copy(tensor, tensor.shape)
    xlac.optimization_barrier_([copy])
    return copy


def with_own_buffer(value: torch.Tensor) -> torch.Tensor:
    """``value``, to copy into another tensor.

    Else torch_xla lets both share a buffer, which the next update of the target in place donates.
    """
    shares = value.device.type == "xla" and not xlac.are_pending([value])[0]
    return prevent_fusion(value) if shares else value


def prevent_recomputation(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which the compiler then stores and does not recompute."""
    return _PreventRecomputation.apply(tensor)


class _PreventRecomputation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return prevent_fusion(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@contextlib.contextmanager
def separate_collectives(device: torch.device) -> Iterator[None]:
    """Collectives within are not ordered with those outside."""
    rank = current_rank()
    order = None if rank is None else rank.order
    token = xlac.collective_token(str(device))
    xlac.set_collective_token(str(device), None)
    try:
        if order is None:
            yield
        else:
            with order.separate_chain(lambda: as_data(False, device)):
                yield
    finally:
        xlac.set_collective_token(str(device), token)
