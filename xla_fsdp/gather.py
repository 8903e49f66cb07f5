"""From shards to full parameters in the forward, from full gradients to shards in the backward.

One autograd node gathers all parameters of a unit for one forward. Autograd itself then does the
bookkeeping: the node's backward runs once every use of every parameter has delivered its gradient,
an unused parameter delivers ``None``, and the shard's ``.grad`` accumulates over forwards and
backwards. What is left for this project is to move the bytes, and to own nothing in between.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from .swap import fill_, free_
from .tree import map_tensors

if TYPE_CHECKING:
    from .unit import Unit


class Residency(enum.Enum):
    """What of a unit's parameters a pass holds in device memory."""

    SHARDS = enum.auto()  # nothing beyond the shards: the full tensors have one element each
    FULL = enum.auto()  # the full parameters, in compute dtype


class Pass:
    """One forward of a unit, until its backward is over.

    The pass keeps the tensor objects that the forward computed with. Their place in the autograd
    graph lasts as long as they do; their values come and go (see :class:`Residency`).

    Lifetime: the graph's saved recipes and output hooks own the pass, the pass owns the full
    tensors, these own the gathering node, which knows the pass only weakly. So all of it goes with
    the graph, without waiting for the garbage collector.
    """

    def __init__(self, unit: Unit):
        self.unit = unit
        self.full: list[torch.Tensor] = []
        self.residency = Residency.SHARDS

    def gather(self, events: Sequence[torch.Tensor], anchored: bool) -> None:
        """Fills the pass for its forward, not before ``events`` exist.

        ``anchored``: give the parameters a graph even if none of them needs a gradient.
        """
        anchor = torch.zeros((), requires_grad=True) if anchored else None
        self.full = list(Gather.apply(self, events, anchor, *self.unit.shards))
        self.residency = Residency.FULL

    def regather(self, events: Sequence[torch.Tensor]) -> None:
        """``SHARDS`` to ``FULL``, not before ``events`` exist; nothing if it is ``FULL``."""
        if self.residency is Residency.SHARDS:
            with torch.no_grad():
                fill_(self.full, self.unit.gather(events, backward=True))
            self.residency = Residency.FULL

    def release(self) -> None:
        """To ``SHARDS``."""
        if self.residency is Residency.FULL:
            free_(self.full, self.unit.placeholder)
            self.residency = Residency.SHARDS

    def copied_out(self, outputs: Any) -> Any:
        """``outputs`` with copies of parameters that are returned themselves and would be freed."""
        own = {id(tensor) for tensor in self.full}
        return map_tensors(lambda t: torch.view_copy(t, t.shape) if id(t) in own else t, outputs)

    def value(self, index: int) -> torch.Tensor:
        """Full parameter ``index`` without its graph, regathered where the unit is not in its
        backward yet (its outputs got no gradient, but a tensor it saved is asked for)."""
        self.regather(())
        return self.full[index].detach()


class _Computing(threading.local):
    def __init__(self) -> None:
        self.passes: tuple[Pass, ...] = ()


_this_thread = _Computing()


def computing_passes() -> tuple[Pass, ...]:
    """The passes in whose forward this thread is, outermost first."""
    return _this_thread.passes


@contextlib.contextmanager
def computing(passes: tuple[Pass, ...]) -> Iterator[None]:
    """Within, this thread is in the forward of ``passes`` too."""
    before = _this_thread.passes
    _this_thread.passes = before + passes
    try:
        yield
    finally:
        _this_thread.passes = before


class Gather(torch.autograd.Function):
    """``apply(source, events, anchor, *shards)`` gives every full parameter of a unit.

    Frozen parameters come out of the same node as the others. They need no gradient (what arrives
    for them is dropped before anything is computed from it), but only a tensor with a graph can be
    recognised when an operator saves it; hence the ``anchor``, a scalar that needs a gradient when
    nothing of the unit itself does.
    """

    @staticmethod
    def forward(ctx, source: Pass, events, anchor, *shards):
        ctx.set_materialize_grads(False)
        ctx.source = weakref.ref(source)
        ctx.unit = source.unit
        return tuple(source.unit.gather(events, backward=False))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, None, None, *ctx.unit.reduce(grads, ctx.needs_input_grad[3:])


# The class of the nodes that Gather leaves in the graph.
GatherNode = Gather._backward_cls
