"""One CPU launch: its ranks, and how they cut their graphs together.

A cut makes pending operations a running program: ``torch_xla.sync()``, ``.item()``, ``xm.save``. At
a cut with collectives all ranks meet at a barrier, which raises where XLA would hang. Then rank 0
compiles and dispatches its program, and the others find it in the compile cache.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, zip_longest
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm

from ... import xlac
from ...tpu.slices import equal_parts
from ...tree import overrides_dispatch
from ..errors import CollectiveMismatchError, Preempted, RankStopped, RankTimeoutError
from ..rank import CollectiveOrder, RankContext, TracedCollective, _set_current_rank, current_rank
from . import call_site
from .rng import RankGenerators
from .start_gate import StartGate

_COLLECTIVE_NODE = re.compile(
    r"= (\S.*?) (xla::(?:all_gather|reduce_scatter|cross_replica_sum|all_to_all|"
    r"collective_permute|scan_blocks)\w*)\("
)
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
    """A barrier of all ranks that compares what they wait for.

    If keys differ, or a rank has ended, the ranks can never continue. The timeout is only for ranks
    that still run. ``locate``: where a running rank is in user code.
    """

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


class Session:
    """The ranks of one launch; rank r runs on device ``xla:r``.

    Attributes:
        dispatching: the ranks that must not be interrupted, because others need their program.
        expected: for each rank, the number of programs with collectives that it has dispatched.
        preempted: the exception that ended the ranks' functions, if the machine is preempted.
    """

    def __init__(self, size: int, timeout: float, gate: StartGate, slices: int = 1) -> None:
        self.size = size
        self.gate = gate
        store, parts = dist.HashStore(), equal_parts(size, slices)
        self.contexts = contexts = list[RankContext]()
        for rank in range(size):
            device = torch.device("xla", rank)
            chain = _chain(gate, rank, device) if size > 1 else None
            contexts.append(RankContext(rank, size, device, store, parts, chain))
        # Without a reference to this object, which would be a reference cycle.
        self.barrier = Barrier(
            size, timeout, lambda rank: call_site.of_thread(contexts[rank].thread)
        )
        self.generators = RankGenerators(self.contexts)
        self.dispatching = [False] * size
        self.expected = [0] * size
        self.preempted: Preempted | None = None
        # The originals, which a launch replaces.
        self._step_marker = xlac.sync_device.value
        self._sync_multi = xlac.sync_tensors.value
        self._real_devices = xm.xla_real_devices()  # "CPU:0", ...
        self._reading = threading.RLock()

    def rank_of(self, device: Any = None) -> RankContext | None:
        """The rank of this thread, else of ``device``, if any."""
        context = current_rank()
        if context is not None:
            return context
        if device is None or device == "":
            return None
        device = torch.device(device)
        if device.type != "xla" or not self.contexts[0].active:
            return None
        index = device.index or 0
        return self.contexts[index] if index < self.size else None

    def adopt_thread(self, context: RankContext) -> None:
        """Assigns this thread to a rank, and sets its default XLA device."""
        _set_current_rank(context)
        xlac.set_default_device(str(context.device))

    def sync(
        self, context: RankContext, device: str, devices: list[str], wait: bool, reset_scope: bool
    ) -> None:
        """Runs all that is pending on the device, as one program."""
        self.barrier.raise_if_stopped()
        dispatch = partial(self._step_marker, device, devices, reset_scope=reset_scope)
        if not context.pending:
            dispatch(wait=wait)
            return
        arrival = _arrival("torch_xla.sync()", "sync", context.pending)
        # Rank 0 must not wait here: others could not dispatch.
        self._run_all(context, arrival, partial(dispatch, wait=False))
        if wait:
            self._wait_for_device(context)

    def sync_tensors(
        self,
        context: RankContext,
        what: str,
        tensors: Sequence[torch.Tensor],
        devices: Sequence[str] = (),
        wait: bool = False,
        sync_xla_data: bool = True,
    ) -> None:
        """Runs the pending graph of ``tensors`` only; collectives stay pending for others."""
        self.barrier.raise_if_stopped()
        dispatch = partial(self._sync_multi, tensors, list(devices), sync_xla_data=sync_xla_data)
        nodes = self._collectives_in(context, tensors)
        if not nodes:
            dispatch(wait=wait)
            return
        arrival = Arrival(what, ("tensors", nodes), call_site.here(), nodes)
        self._together(context, arrival, partial(dispatch, wait=False))
        if wait:
            self._wait_for_device(context)

    def fetch(
        self, context: RankContext, what: str, tensors: Sequence[torch.Tensor], read: Callable
    ) -> Any:
        """Runs the pending graph of ``tensors`` and returns the result of ``read()``.

        With collectives, all that is pending runs: otherwise later programs would run them again.
        Without collectives no rank waits for others.
        """
        self.before_read(context, what, tensors)
        with self._reading:
            return read()

    def before_read(self, context: RankContext, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Computes ``tensors``, so that reading them waits for nothing."""
        if self._collectives_in(context, tensors):
            device = str(context.device)
            dispatch = partial(xlac.sync_live_tensors, device, [], False)
            self._run_all(context, _arrival(what, "read", context.pending), dispatch)
            xlac.set_collective_token(device, None)
        elif tensors and any(xlac.are_pending(list(tensors))):
            with self._reading:  # the second rank finds the program in the cache
                self._sync_multi(list(tensors), [], wait=False, sync_xla_data=True)
        # If two ranks read tensors that are still being computed, torch_xla crashes in about one of
        # 2000 launches on a loaded machine.
        self._wait_for_device(context)

    def exchange(self, context: RankContext, what: str, payload: Any) -> list:
        arrival = Arrival(what, ("exchange", what), call_site.here(), payload=payload)
        return self.barrier.meet(context.rank, arrival)

    def wait_for_all_ranks(self, context: RankContext) -> None:
        """Waits for the other ranks after this rank's function has returned.

        Pending operations are not run: which ones there are depends on the garbage collector.
        """
        arrival = _arrival("its function returned", "finish", context.pending)
        self.barrier.meet(context.rank, arrival)

    def stop_if_deadlocked(self) -> None:
        """Stops the ranks if one runs a program that the others cannot run.

        An operator that torch_xla computes on the CPU cuts the graph where no hook detects it.
        Ranks at the barrier cannot start the matching program.
        """
        unseen, waiting = [], self.barrier.waiting()
        for rank, (started, expected) in enumerate(
            zip(self.gate.started, self.expected, strict=True)
        ):
            if started > expected and rank in self.gate.waiting:
                unseen.append(rank)
            elif rank not in waiting or started < expected:
                return
        if unseen:
            what = "an operator that reads pending collectives"
            self.barrier.stop_mismatched(dict.fromkeys(unseen, what))

    def _wait_for_device(self, context: RankContext) -> None:
        xm.wait_device_ops([self._real_devices[context.rank]])

    def _run_all(
        self, context: RankContext, arrival: Arrival, dispatch: Callable[[], None]
    ) -> None:
        # Must live until the dispatch: the program then includes all collectives.
        end = None if context.order is None else context.order.end()
        self._together(context, arrival, dispatch)
        del end
        context.forget()

    def _together(
        self, context: RankContext, arrival: Arrival, dispatch: Callable[[], None]
    ) -> None:
        # One program with collectives at a time: channel ids repeat.
        self._wait_for_device(context)
        leads = context.rank == 0
        own = Future[bool]() if leads else None
        dispatched = self.barrier.meet(context.rank, replace(arrival, payload=own))[0]
        self.dispatching[context.rank] = True
        # Not the previous number plus one: an operator may have run an undetected program.
        if context.order is not None:
            self.expected[context.rank] = self.gate.started[context.rank] + 1
        try:
            # Nothing may interrupt a rank in this block, because others wait for it.
            if leads:
                try:
                    dispatch()
                except BaseException:
                    dispatched.set_result(False)
                    raise
                dispatched.set_result(True)
            elif dispatched.result():
                dispatch()
        finally:
            self.dispatching[context.rank] = False
        # All ranks dispatch first: one that continued could block while it holds the GIL.
        self.barrier.meet(context.rank, Arrival(arrival.what, "dispatched", arrival.where))

    def _collectives_in(
        self, context: RankContext, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[str, str], ...]:
        if not context.pending or not tensors:
            return ()
        text = xlac.graph_text(list(tensors))
        return tuple((kind, shape) for shape, kind in _COLLECTIVE_NODE.findall(text))


def _chain(gate: StartGate, rank: int, device: torch.device) -> CollectiveOrder:
    def start() -> torch.Tensor:
        # As data: all ranks share one program.
        number = torch.tensor([rank], dtype=torch.int32, device="cpu")
        sent: Any = xm.send_cpu_data_to_device([number], device)
        return gate.wait_for_all(sent[0])

    return CollectiveOrder(device, start)


def _arrival(what: str, kind: str, pending: list[TracedCollective]) -> Arrival:
    key = (kind, tuple(collective.key for collective in pending))
    return Arrival(what, key, call_site.here(), tuple(pending))


def wait_for_programs(failed: bool) -> None:
    """Programs of a ``failed`` launch may end with an error."""
    for device in xm.xla_real_devices():
        with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
            xm.wait_device_ops([device])


def drop_pending(contexts: Sequence[RankContext]) -> None:
    """Removes unfinished collectives from the devices at the end of a launch.

    The user's tensors are filled with NaN (integers: zero).
    """
    devices = {str(context.device) for context in contexts if context.pending}
    for context in contexts:
        context.forget()
        xlac.set_collective_token(str(context.device), None)
    if not devices:
        return
    gc.collect()
    gc.unfreeze()  # Python does not list frozen objects
    lost = [
        value
        for value in objects_of(torch.Tensor)
        if is_xla(value) and str(value.device) in devices and xlac.are_pending([value])[0]
    ]
    for device in sorted(devices):
        xlac.forget_pending(device)
    for tensor in lost:
        fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        with torch._C.DisableTorchFunctionSubclass():  # only the local part of a sharded tensor
            value = torch.full(tensor.shape, fill, dtype=tensor.dtype, device="cpu").to(
                tensor.device
            )
        xlac.replace_data(tensor, value)


def is_xla(tensor: torch.Tensor) -> bool:
    """False for a class that only reports the XLA device."""
    try:
        return not overrides_dispatch(type(tensor)) and tensor.device.type == "xla"
    except Exception:  # a subclass in the middle of its construction, or autograd has released it
        return False


def objects_of(kind: type) -> list[Any]:
    """All objects of a type that Python tracks and are not frozen."""
    # A list of all objects references tuples under construction. A thread that resizes one gets
    # a SystemError, so no other thread may run Python meanwhile, for up to 2 s.
    before = sys.getswitchinterval()
    sys.setswitchinterval(2.0)
    try:
        time.sleep(0)  # a thread that waits already runs first
        objects = gc.get_objects()
        # type(), because isinstance() reads __class__, which is slow and runs code of objects.
        kinds = {one for one in set(map(type, objects)) if kind in one.__mro__}
        found = list(compress(objects, map(kinds.__contains__, map(type, objects))))
        del objects
    finally:
        sys.setswitchinterval(before)
        time.sleep(0)  # else a thread that waits since then waits for 2 s
    return found
