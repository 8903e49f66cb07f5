"""From shards to full parameters in the forward, from full gradients to shards in the backward.

One autograd node gathers all parameters of a unit for one forward. Autograd itself then does the
bookkeeping: the node's backward runs once every use of every parameter has delivered its gradient,
an unused parameter delivers ``None``, and the shard's ``.grad`` accumulates over forwards and
backwards. Frozen parameters have no place in the graph. What is left for this project is to move
the bytes, and to own nothing in between.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..tree import map_tensors
from .freeing import Stamp, fill_, free_, stamps
from .secondary import Secondary
from .unsharded import Origin, make_unsharded

if TYPE_CHECKING:
    from .state import FSDPState


class ParameterState(enum.Enum):
    """What of a unit's parameters a pass holds in device memory."""

    # Nothing beyond the shards: the full tensors have one element each. With
    # reshard_after_forward=<int>, until the backward is over, the pieces of a `Secondary`.
    SHARDED = enum.auto()
    UNSHARDED = enum.auto()  # the full parameters, in compute dtype


def refuse_change_in_forward(name: str) -> NoReturn:
    """Raises RuntimeError: a forward has changed its parameter ``name``."""
    raise RuntimeError(
        f"the forward changed its parameter {name!r} (in place, through .data, or by an option "
        "such as Embedding's max_norm). It is sharded: what a forward changes is this rank's "
        "gathered copy, which is lost. Compute with a changed copy instead (w = "
        "self.weight.clamp(-1, 1), or torch.nn.utils.parametrize), or change the shards between "
        "steps, under torch.no_grad() and outside of the forward"
    )


def refuse_change_before_backward(name: str) -> NoReturn:
    """Raises RuntimeError: parameter ``name`` is not what the forward of this backward used."""
    raise RuntimeError(
        f"parameter {name!r} was changed after the forward whose backward this is, by an optimizer "
        "step, a load or in place; the backward needs the values that the forward used. Call "
        "backward first, or run the forward again"
    )


class Pass:
    """One forward of a unit, until its backward is over.

    The pass keeps the tensor objects that the forward computed with. Their place in the autograd
    graph lasts as long as they do; their values come and go (see :class:`ParameterState`).

    Lifetime: the graph's saved recipes and output hooks own the pass, the pass owns the full
    tensors, these own the gathering node, which knows the pass only weakly. So all of it goes with
    the graph, without waiting for the garbage collector.
    """

    def __init__(self, unit: FSDPState, secondary: Secondary | None = None):
        self.unit = unit
        self.secondary = secondary
        self.full: list[torch.Tensor] = []
        self.state = ParameterState.SHARDED
        # Called at the end of every backward; the root wrapper finishes the whole model in it.
        self.on_backward_end: Callable[[], None] | None = None
        # What was gathered, and what came out of it: see :func:`stamps`.
        self._shard_stamps: list[Stamp] = []
        self._full_stamps: list[Stamp] = []

    def gather(self, events: Sequence[torch.Tensor]) -> None:
        """Fills the pass for its forward, not before ``events`` exist."""
        shards = self.unit.shards
        self.full = list(Gather.apply(self, events, *shards))
        source = weakref.ref(self)
        for index, full in enumerate(self.full):
            tensor, member = self.unit.member_of(index)
            name = partial(self.unit.name_of, index)
            alone = not tensor.flattened
            make_unsharded(full, Origin(tensor, member, name, alone, source, index))
        self.state = ParameterState.UNSHARDED
        self._shard_stamps = stamps(shards)
        self._full_stamps = stamps(self.full)

    def require_full_unchanged(self) -> None:
        """After the forward: raises RuntimeError if it changed one of its parameters.

        Each rank has a copy of its own, which is freed now: the change would be lost, and the
        backward would compute with another value than the forward.
        """
        for index, (now, before) in enumerate(
            zip(stamps(self.full), self._full_stamps, strict=True)
        ):
            if now != before:
                refuse_change_in_forward(self.unit.name_of(index))

    def require_shards_unchanged(self, index: int | None = None) -> None:
        """Raises RuntimeError if the shard of parameter ``index`` (``None``: any) is not what was
        gathered for the forward, so that the backward would compute with another value."""
        numbers = range(len(self._shard_stamps)) if index is None else [self.unit.shard_of(index)]
        shards = self.unit.shards
        now = stamps(shards[number] for number in numbers)
        for number, found in zip(numbers, now, strict=True):
            if found != self._shard_stamps[number]:
                known = range(len(self.full)) if index is None else [index]
                name = next(self.unit.name_of(i) for i in known if self.unit.shard_of(i) == number)
                refuse_change_before_backward(name)

    def unshard(self, events: Sequence[torch.Tensor]) -> None:
        """To ``UNSHARDED``, not before ``events`` exist; nothing if it is so already."""
        if self.state is ParameterState.SHARDED:
            with torch.no_grad():
                fill_(self.full, self.unit.gather(events, True, self.secondary))
            self.state = ParameterState.UNSHARDED

    def reshard(self) -> None:
        """To ``SHARDED``."""
        if self.state is ParameterState.UNSHARDED:
            free_(self.full, self.unit.placeholder)
            self.state = ParameterState.SHARDED

    def finish(self) -> None:
        """After the backward: to ``SHARDED``, and nothing is kept for another one."""
        self.reshard()
        if self.secondary is not None:
            self.secondary.pieces.clear()

    def copied_out(self, outputs: Any) -> Any:
        """``outputs`` with copies of parameters that are returned themselves and would be freed."""
        own = {id(tensor) for tensor in self.full}
        return map_tensors(lambda t: torch.view_copy(t, t.shape) if id(t) in own else t, outputs)

    def value(self, index: int) -> torch.Tensor:
        """Full parameter ``index`` without its graph, regathered where the unit is not in its
        backward yet (its outputs got no gradient, but a tensor it saved is asked for)."""
        self.require_shards_unchanged(index)
        self.unshard(())
        return self.full[index].detach()


class _Computing(threading.local):
    def __init__(self) -> None:
        self.passes: tuple[Pass, ...] = ()
        self.in_method = False


_this_thread = _Computing()


def computing_passes() -> tuple[Pass, ...]:
    """The passes in whose forward this thread is, outermost first."""
    return _this_thread.passes


def expects_full_parameters() -> bool:
    """Whether this thread is in a forward, or in a method that :func:`in_method` was told of: what
    reads a parameter there means to compute with all of it."""
    return bool(_this_thread.passes) or _this_thread.in_method


@contextlib.contextmanager
def in_method() -> Iterator[None]:
    """Within, this thread is in a method of a wrapped module for which nothing was gathered."""
    before, _this_thread.in_method = _this_thread.in_method, True
    try:
        yield
    finally:
        _this_thread.in_method = before


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
    """``apply(source, events, *shards)`` gives every full parameter of a unit.

    Those of frozen shards need no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Pass,
        events: Sequence[torch.Tensor],
        *shards: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source = weakref.ref(source)
        ctx.unit = unit = source.unit
        full = [_no_view(one) for one in unit.gather(events, False, source.secondary)]
        trains = [shards[unit.shard_of(index)].requires_grad for index in range(len(full))]
        frozen = [one for one, needed in zip(full, trains, strict=True) if not needed]
        ctx.mark_non_differentiable(*frozen)
        return tuple(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        leaves = [leaf for leaf, _ in ctx.next_functions]  # one for each input that is a tensor
        return None, None, *ctx.unit.reduce(grads, needed, leaves)


def _no_view(value: torch.Tensor) -> torch.Tensor:
    """``value``, such that it is the base of its own views: see saved_parameters.py."""
    is_view = value._base is not None or isinstance(value, nn.Parameter)
    return value.detach() if is_view else value


# The class of the nodes that Gather leaves in the graph.
GatherNode = Gather._backward_cls
