"""The rank of a thread, inside a CPU launch.

On TPU a rank is a process, and torch_xla knows the rank of the process. On CPU ranks are threads of
one process, and one :class:`RankContext` has all that differs between them. That includes the order
of its collectives, :class:`CollectiveOrder`.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_xla.core.xla_builder as xb

from .. import xlac


class CollectiveOrder:
    """Chains the collectives that one rank traces, by data dependencies of its program.

    XLA on a CPU runs the collectives of a program one at a time, in an order that it chooses for
    each program. Programs of ranks can differ, for example because optimizers have their parameters
    in another order or a batch has another length. Then ranks would wait for each other in
    different collectives. So each collective depends on the one that the rank traced before it, and
    a program ends with a value that depends on the last one. Two ranks that traced the same
    collectives can then run any two programs together.

    The dependency is a boolean that is always false when the program runs, but unknown to the
    compiler. An operand becomes ``where(boolean, 0, operand)``, so a NaN in one result does not
    reach the next.

    Args:
        device: the rank's XLA device.
        first: returns the boolean on which a program's first collective depends.
    """

    def __init__(self, device: torch.device, first: Callable[[], torch.Tensor]) -> None:
        self._device = str(device)
        self._first = first
        self._last: torch.Tensor | None = None
        self._computations: dict[tuple, object] = {}

    def depend_on_last(self, operand: torch.Tensor) -> torch.Tensor:
        """Makes ``operand`` of the next collective depend on all collectives before it."""
        # torch_xla's chain adds a number to the operands, which is NaN after a result with a NaN.
        xlac.set_collective_token(self._device, None)
        if self._last is None:
            self._last = self._first()
        if not operand.numel():
            return operand
        return self._call("depend_on_last", _guarded, [operand, self._last])

    def add(self, result: torch.Tensor) -> None:
        """Makes the next collective depend on ``result`` of this one."""
        xlac.set_collective_token(self._device, None)
        if self._last is not None and result.numel():
            self._last = self._call("collective_order", _dependent, [result, self._last])

    def end(self) -> torch.Tensor | None:
        """Returns the boolean that depends on all collectives so far, and begins a new chain."""
        last, self._last = self._last, None
        return last

    @contextlib.contextmanager
    def separate_chain(self, first: Callable[[], torch.Tensor] | None = None) -> Iterator[None]:
        """A context whose collectives are a separate chain, which begins with ``first``."""
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
            computation = self._computations[key] = build(*given).build(name)
        with torch.no_grad():
            made = xlac.call_computation(f"xla::{name}", operands, computation)
        return made[0]


def _guarded(operand: xb.Op, last: xb.Op) -> xb.Op:
    zero = operand.zeros_like()
    return last.broadcast(tuple(operand.shape().sizes)).select(zero, operand)


def _dependent(result: xb.Op, last: xb.Op) -> xb.Op:
    rank = len(result.shape().sizes)
    one = result.slice([0] * rank, [1] * rank, [1] * rank).reshape(())
    return last & (one != one.zeros_like())


class Collective(NamedTuple):
    """A collective that a rank has traced but not run yet."""

    channel: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str
    where: str  # file:line of the caller, which may differ between ranks

    @property
    def key(self) -> tuple:
        """The attributes that must be equal on every rank."""
        return self[:5]

    def __str__(self) -> str:
        text = f"{self.kind}{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        text += f" channel {self.channel}"
        if self.label:
            text += f" {self.label!r}"
        if self.where:
            text += f" ({self.where})"
        return text


class RankContext:
    """One rank of a CPU launch, and the collectives that it has traced.

    Attributes:
        rank: this rank's number, ``0 <= rank < size``.
        size: the number of ranks of the launch.
        device: the rank's XLA device.
        store: a key-value store that all ranks of the launch share.
        thread: the identifier of the thread that runs its function; ``None`` until that begins.
        pending: collectives traced since the last full sync, in order.
        active: whether the launch is still running. Threads of autograd or the user outlive it.
        stepping: whether the rank is in an optimizer's step.
        slices: ordinals of the ranks of each slice that the launch simulates; ``()`` for one slice.
        as_on_tpu: whether to trace the graph of a TPU, see ``World.as_on_tpu``
            (collectives/world.py). For tests, which have no TPU.
        order: chains the rank's collectives; ``None`` for a single rank, and with ``as_on_tpu``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: dist.Store,
        slices: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.thread: int | None = None
        self.pending: list[Collective] = []
        self.active = True
        self.stepping = False
        self.slices = slices
        self.as_on_tpu = False
        self._order: CollectiveOrder | None = None
        self.store = store
        self._numbers = defaultdict[str, Iterator[int]](itertools.count)
        self._issued = 0
        self._lock = threading.Lock()

    @property
    def order(self) -> CollectiveOrder | None:
        """The chain of the rank's collectives, or ``None``; see the class."""
        return None if self.as_on_tpu else self._order

    def chain_collectives(self, first: Callable[[], torch.Tensor]) -> None:
        """Starts to chain collectives, see :class:`CollectiveOrder`."""
        self._order = CollectiveOrder(self.device, first)

    def next_channel(
        self,
        kind: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        label: str = "",
        *,
        where: str = "",
    ) -> int:
        """Returns a new channel id for a collective, and records the collective as pending.

        Ids start again at 1 after each full sync: the id is part of the program, so the same step
        must get the same ids or it would compile again. Any thread of the rank may call this,
        also autograd's.

        Args:
            kind: the operation, for example ``"all_gather"``.
            shape: the shape of the collective's input.
            dtype: the element type of the input.
            label: its purpose (parameter, unit), for reports; must not differ between ranks.
            where: ``file:line`` of the caller, for reports; may differ between ranks.
        """
        with self._lock:
            self._issued += 1
            record = Collective(self._issued, kind, tuple(shape), dtype, label, where)
            self.pending.append(record)
            return self._issued

    def record(
        self, channel: int, kind: str, shape: Sequence[int], dtype: torch.dtype, where: str
    ) -> None:
        """Records a collective whose caller chose the channel id; known ids are not changed."""
        with self._lock:
            if all(known.channel != channel for known in self.pending):
                self.pending.append(Collective(channel, kind, tuple(shape), dtype, "", where))

    def forget(self) -> None:
        """Clears the pending collectives after a dispatch or drop; ids start again at 1."""
        with self._lock:
            self.pending = []
            self._issued = 0
        if self._order is not None:
            self._order.end()

    @contextlib.contextmanager
    def separate_channels(self) -> Iterator[None]:
        """A context with separate channel ids and pending collectives.

        The collectives that are traced within must be dispatched before it ends. Afterwards the
        earlier collectives are pending again.
        """
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
        """Posts a picklable ``value`` for all ranks, without waiting.

        The last rank that posts gets the values of all ranks, by rank; the others get ``None``. The
        n-th post of a rank belongs to the n-th of every other.
        """
        key = f"post/{self.number_of('post')}/{tag}"
        # torch's stub knows only str; bytes are stored as they are.
        self.store.set(f"{key}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        if self.store.add(key, 1) < self.size:
            return None
        return [pickle.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.size)]

    def number_of(self, use: str) -> int:
        """How often this rank has called this for ``use`` before.

        It numbers objects that all ranks create in the same order.
        """
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

    It is set on the rank's thread, on threads that this starts, and on the autograd thread of its
    device.
    """
    context = _this_thread.context
    return context if context is not None and context.active else None


def _set_current_rank(context: RankContext | None) -> None:
    _this_thread.context = context


def is_simulated_rank() -> bool:
    """Whether this thread is a simulated rank, which only traces.

    It cannot communicate with other ranks, and its tensors have no values.
    """
    return _this_thread.simulated_rank


def set_simulated_rank(yes: bool) -> None:
    """Sets the value of :func:`is_simulated_rank` for this thread."""
    _this_thread.simulated_rank = yes


@contextlib.contextmanager
def simulated_rank() -> Iterator[None]:
    """A context in which :func:`is_simulated_rank` is true."""
    before = is_simulated_rank()
    set_simulated_rank(True)
    try:
        yield
    finally:
        set_simulated_rank(before)
