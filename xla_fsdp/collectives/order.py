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

import enum
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import xlac

# What a scalar can stand in for.
_CAN_WAIT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BackwardPrefetch(enum.Enum):
    """When the parameters of the next unit of a backward are gathered."""

    BACKWARD_PRE = "pre"  # beside the gradients of the unit before: two units are full at a time
    BACKWARD_POST = "post"  # after them, beside their reduction


class Order:
    """How far the units of one model are, in the step that is being traced.

    Lifetime: what it holds are the inputs and gradients of the last unit or two, and only until the
    forward or backward under way is over: a tensor that is held when the program runs becomes an
    output of it.
    """

    def __init__(self) -> None:
        self._started: Sequence[torch.Tensor] = ()  # what the last unit's forward started from
        self._arrived: Sequence[torch.Tensor] = ()  # the same of the backward
        self.last: torch.Tensor | None = None  # made of the last parameter gathered
        self._last_but_one: torch.Tensor | None = None  # and of the one before it
        # Of inputs that wait in the host's memory: what the last recomputation started from, and
        # something that says that the last forward's are there.
        self._recomputing: Sequence[torch.Tensor] = ()
        self._on_host: torch.Tensor | None = None
        # Reduced gradients: of the unit before the last one, and since.
        self._reduced: list[torch.Tensor] = []
        self._reducing: list[torch.Tensor] = []
        self._done: list[torch.Tensor] = []  # of the unit before that

    def __deepcopy__(self, memo: dict) -> Order:
        """A copy of a model is not under way."""
        return memo.setdefault(id(self), Order())

    def forward(self, inputs: Sequence[torch.Tensor], prefetch: bool) -> Sequence[torch.Tensor]:
        """What the gather of a unit whose forward starts from ``inputs`` waits for."""
        before, self._started = self._started, inputs
        return before if prefetch and before else inputs

    def backward(
        self,
        grads: Sequence[torch.Tensor],
        prefetch: BackwardPrefetch | None,
        limit: bool,
    ) -> list[torch.Tensor]:
        """What the gather of a unit waits for whose backward starts from ``grads``.

        ``limit``: also for the reduction of the unit two before (without prefetch: one before), so
        that full gradients of at most two units exist.
        """
        before, self._arrived = self._arrived, grads
        done, self._reduced, self._reducing = self._reduced, self._reducing, []
        self._done = done
        early = prefetch is BackwardPrefetch.BACKWARD_PRE
        events = list(before if early and before else grads)
        if limit:
            events += done
            if prefetch is None:
                events += self._reduced
        return events

    @property
    def arrived(self) -> Sequence[torch.Tensor]:
        """What the last unit's backward started from, as :meth:`backward` was told."""
        return self._arrived

    def offload(self, arrived: torch.Tensor) -> torch.Tensor | None:
        """What a forward waits for whose inputs go to the host: that those of the one before are
        there. ``arrived`` says it of its own."""
        before, self._on_host = self._on_host, arrived
        return before

    def recompute(self, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        """What the inputs of a recomputation that starts from ``grad`` wait for before they come
        back from the host.

        For what the one before started from, so that they travel meanwhile, and for the reduction
        of the unit two before, so that those of at most two are there.
        """
        before, self._recomputing = self._recomputing, [grad]
        return [*(before or [grad]), *self._done]

    def turn(self, shard: torch.Tensor, but_one: bool = False) -> torch.Tensor:
        """``shard``, not before the gather whose result :meth:`gathered` was told last is over.

        ``but_one``: the one before that.
        """
        event = self._last_but_one if but_one else self.last
        if event is None or shard.dtype not in _CAN_WAIT:
            return shard
        return torch.where(event, 0.0, shard)

    def gathered(self, full: torch.Tensor) -> None:
        """What came out of the gather whose turn it was."""
        # False whatever the value, NaN too, but only the program that runs knows. Not a barrier:
        # the TPU compiler drops those that tie one large tensor to a small one.
        self._last_but_one = self.last
        self.last = torch.slice_copy(full.view(-1), 0, 0, 1) > math.inf

    def reduced(self, shards: Sequence[torch.Tensor]) -> None:
        """Gradient shards of the unit whose backward ends."""
        self._reducing += shards

    def forward_over(self) -> None:
        """The outermost forward ended, or will not end."""
        self._started, self.last, self._last_but_one = (), None, None
        self._on_host = None

    def backward_over(self) -> None:
        """A backward ended, or will not end."""
        self._arrived, self._reduced, self._reducing, self._done = (), [], [], []
        self._recomputing = ()
        self.last = self._last_but_one = None
        self._on_host = None  # a recomputation may have checkpointed modules in it


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
