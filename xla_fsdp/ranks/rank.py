"""The rank of a thread inside a CPU launch, where ranks are threads of one process."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_xla.core.xla_builder as xb

from .. import xlac


class CollectiveOrder:
    """Chains the collectives that one rank traces, by data dependencies of its program.

    XLA on a CPU chooses the order of a program's collectives, and programs of ranks can differ. So
    each collective depends on the one before, and a program's end on the last. The dependency is a
    boolean that is false at run time, which the compiler does not know: an operand becomes
    ``where(boolean, 0, operand)``, so that no NaN reaches the next collective.
    """

    def __init__(self, device: torch.device, first: Callable[[], torch.Tensor]) -> None:
        self._device = str(device)
        self._first = first
        self._last: torch.Tensor | None = None
        self._computations: dict[tuple, object] = {}

    def depend_on_last(self, operand: torch.Tensor) -> torch.Tensor:
        """Makes ``operand`` of the next collective depend on all collectives before it."""
        # torch_xla's chain adds a number, which is NaN after a NaN.
        xlac.set_collective_token(self._device, None)
        if self._last is None:
            self._last = self._first()
        if not operand.numel():
            return operand
        return self._call("depend_on_last", _delay_operand, [operand, self._last])

    def add(self, result: torch.Tensor) -> None:
        xlac.set_collective_token(self._device, None)
        if self._last is not None and result.numel():
            self._last = self._call("collective_order", _dependent, [result, self._last])

    def end(self) -> torch.Tensor | None:
        """Begins a new chain; returns the boolean that depends on all collectives so far."""
        last, self._last = self._last, None
        return last

    @contextlib.contextmanager
    def separate_chain(self, first: Callable[[], torch.Tensor] | None = None) -> Iterator[None]:
        before = self._last, self._first
        self._last, self._first = None, first or self._first
        try:
            yield
        finally:
            self._last, self._first = before

    def _call(self, name: str, build: Callable, operands: list[torch.Tensor]) -> torch.Tensor:
        value = operands[0]
        key = (name, value.dtype, value.shape)
        computation = self._computations.get(key)
        if computation is None:
            builder = xb.create_builder(name)
            shapes = [(xb.Op.from_torch_type(value.dtype), value.shape), (xb.Type.PRED, ())]
            given = [
                xb.mkparam(builder, number, xb.mkshape(dtype, tuple(shape)))
                for number, (dtype, shape) in enumerate(shapes)
            ]
            with torch.device("cpu"):  # torch_xla makes constants on the default device
                computation = self._computations[key] = build(*given).build(name)
        with torch.no_grad():
            made = xlac.call_computation(f"xla::{name}", operands, computation)
        return made[0]


def _delay_operand(operand: xb.Op, last: xb.Op) -> xb.Op:
    zero = operand.zeros_like()
    return last.broadcast(tuple(operand.shape().sizes)).select(zero, operand)


def _dependent(result: xb.Op, last: xb.Op) -> xb.Op:
    rank = len(result.shape().sizes)
    one = result.slice([0] * rank, [1] * rank, [1] * rank).reshape(())
    return last & (one != one.zeros_like())


class TracedCollective(NamedTuple):
    """A collective that a rank has traced but not run yet."""

    channel: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str
    where: str  # file:line; may differ between ranks

    @property
    def key(self) -> tuple:
        """What must be equal on every rank."""
        return self[:5]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        label = f" {self.label!r}" if self.label else ""
        where = f" ({self.where})" if self.where else ""
        return f"{self.kind}{list(self.shape)} {dtype} channel {self.channel}{label}{where}"


@dataclass(eq=False)
class RankContext:
    """One rank of a CPU launch, and the collectives that it has traced.

    Attributes:
        slices: ordinals of the ranks of each simulated slice; ``()`` for one slice.
        chain: ``None`` for a single rank.
        thread: identifier of the thread that runs the rank; ``None`` until that begins.
        pending: collectives traced since the last full sync, in order.
        active: whether the launch is still running; threads of autograd or the user outlive it.
        stepping: whether an optimizer is making its step.
        as_on_tpu: whether to trace the graph of a TPU, see ``World.as_on_tpu``; for tests.
    """

    rank: int
    size: int
    device: torch.device
    store: dist.Store
    slices: tuple[tuple[int, ...], ...]
    chain: CollectiveOrder | None
    thread: int | None = None
    pending: list[TracedCollective] = field(default_factory=list)
    active: bool = True
    stepping: bool = False
    as_on_tpu: bool = False
    _issued: int = 0

    def __post_init__(self) -> None:
        self._numbers = defaultdict[str, Iterator[int]](itertools.count)
        self._lock = threading.Lock()

    @property
    def order(self) -> CollectiveOrder | None:
        """``None`` for a single rank, and with ``as_on_tpu``."""
        return None if self.as_on_tpu else self.chain

    def trace(
        self,
        kind: str,
        operand: torch.Tensor,
        label: str,
        collective: Callable[[torch.Tensor, int], torch.Tensor],
        where: str = "",
    ) -> torch.Tensor:
        """The result of ``collective(operand, channel id)``, after the pending ones. Thread-safe.

        Ids start again at 1 after each full sync, because the id is part of the program. ``label``
        must not differ between ranks; ``where`` may.
        """
        with self._lock:
            self._issued += 1
            channel, shape = self._issued, tuple(operand.shape)
            self.pending.append(TracedCollective(channel, kind, shape, operand.dtype, label, where))
        order = self.order
        if order is None:
            return collective(operand, channel)
        result = collective(order.depend_on_last(operand), channel)
        order.add(result)
        return result

    def forget(self) -> None:
        """Clears the pending collectives; ids start again at 1."""
        with self._lock:
            self.pending = []
            self._issued = 0
        if self.chain is not None:
            self.chain.end()

    @contextlib.contextmanager
    def separate_channels(self) -> Iterator[None]:
        """Collectives that are traced within must be dispatched before it ends."""
        with self._lock:
            before = self.pending, self._issued
            self.pending, self._issued = [], 0
        try:
            with (
                self.order.separate_chain() if self.order is not None else contextlib.nullcontext()
            ):
                yield
        finally:
            with self._lock:
                self.pending, self._issued = before

    def post(self, tag: str, value: Any) -> list[Any] | None:
        """Posts a picklable ``value`` without waiting; the last rank to post gets all values, by
        rank.

        The n-th post of a rank belongs to the n-th of every other.
        """
        key = f"post/{self.number_of('post')}/{tag}"
        self.store.set(f"{key}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        if self.store.add(key, 1) < self.size:
            return None
        return [pickle.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.size)]

    def number_of(self, use: str) -> int:
        """How often this rank has called this for ``use`` before."""
        with self._lock:
            return next(self._numbers[use])

    def __deepcopy__(self, memo: dict) -> RankContext:
        return self  # a copy of a model belongs to the same rank


class _ThisThread(threading.local):
    context: RankContext | None = None
    simulated_rank = False


_this_thread = _ThisThread()


def current_rank() -> RankContext | None:
    """The rank of this thread, or ``None`` outside a CPU launch.

    Also set on threads that the rank starts, and on its device's autograd thread.
    """
    context = _this_thread.context
    return context if context is not None and context.active else None


def _set_current_rank(context: RankContext | None) -> None:
    _this_thread.context = context


def is_simulated_rank() -> bool:
    """Whether this thread only traces: it has no values and no other ranks."""
    return _this_thread.simulated_rank


def set_simulated_rank(yes: bool) -> None:
    _this_thread.simulated_rank = yes
