"""One CPU launch: its ranks, and how they cut their graphs together.

A cut is any point where pending operations become a running program: ``torch_xla.sync()``,
``.item()``, ``xm.save``. A cut without collectives in it concerns one rank only and goes straight
through. At a cut with collectives all ranks meet first, so that what XLA would answer with a hang
is an error; then rank 0 dispatches (and compiles) and the others follow and find its program in the
compile cache.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch_xla.core.xla_model as xm

from ... import xlac
from ...tpu.slices import equal_parts
from ...tree import has_own_operators
from ..errors import Preempted
from ..rank import Board, Collective, RankContext, _set_current_rank, current_rank
from . import call_site
from .barrier import Arrival, Barrier
from .rng import RankGenerators
from .start_gate import StartGate

_T = TypeVar("_T")
_COLLECTIVE_NODE = re.compile(
    r"= (\S.*?) (xla::(?:all_gather|reduce_scatter|cross_replica_sum|all_to_all|"
    r"collective_permute|scan_blocks)\w*)\("
)


class Session:
    """The ranks of one launch on this process's CPU devices.

    Attributes:
        contexts: one a rank; rank r runs on device ``xla:r``.
        barrier: where they meet.
        generators: their random states.
        dispatching: which ranks must not be interrupted, because others depend on their program.
        expected: how many programs with collectives each rank will have started, once those that it
            has dispatched have.
        gate: where these programs wait for those of the other ranks.
        preempted: what the ranks' functions ended with, if the machine is being taken away.
    """

    def __init__(self, size: int, timeout: float, gate: StartGate, slices: int = 1) -> None:
        self.size = size
        self.gate = gate
        board, parts = Board(size), equal_parts(size, slices)
        self.contexts = [
            RankContext(r, size, torch.device("xla", r), board, parts) for r in range(size)
        ]
        self.barrier = Barrier(
            size, timeout, lambda rank: call_site.of_thread(self.contexts[rank].thread)
        )
        self.generators = RankGenerators(self.contexts)
        self.dispatching = [False] * size
        self.expected = [0] * size
        self.preempted: Preempted | None = None
        # torch_xla's own functions, kept here because the module's names are replaced meanwhile.
        self._step_marker = xlac.sync_device.value
        self._sync_multi = xlac.sync_tensors.value
        self._real_devices = xm.xla_real_devices()  # "CPU:0", ...
        self._reading = threading.RLock()
        if size > 1:
            for context in self.contexts:
                context.keep_order(_start_of_program(gate, context))

    def rank_of(self, device: Any = None) -> RankContext | None:
        """The rank of this thread, else the owner of ``device``; ``None`` for strangers."""
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
        """Makes this thread one of ``context``'s: its rank, and its default XLA device."""
        _set_current_rank(context)
        xlac.set_default_device(str(context.device))

    def sync(
        self, context: RankContext, device: str, devices: list[str], wait: bool, reset_scope: bool
    ) -> None:
        """``torch_xla.sync``: everything that is live on the device becomes a program."""
        self.barrier.raise_if_stopped()
        pending = context.pending
        if not pending:
            self._step_marker(device, devices, wait=wait, reset_scope=reset_scope)
            return
        self._run_all(
            context,
            _arrival("torch_xla.sync()", "sync", pending),
            # Waiting here would keep rank 0 from letting the others dispatch.
            lambda: self._step_marker(device, devices, wait=False, reset_scope=reset_scope),
        )
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
        """The pending graph of ``tensors`` alone becomes a program (``xm.save``, results).

        Collectives stay pending: other tensors may need them again.
        """
        self.barrier.raise_if_stopped()
        nodes = self._collectives_in(context, tensors)
        if nodes:
            arrival = Arrival(what, ("tensors", nodes), call_site.here(), nodes)
            self._together(
                context,
                arrival,
                lambda: self._sync_multi(
                    tensors, list(devices), wait=False, sync_xla_data=sync_xla_data
                ),
            )
            if wait:
                self._wait_for_device(context)
        else:
            self._sync_multi(tensors, list(devices), wait=wait, sync_xla_data=sync_xla_data)

    def fetch(
        self,
        context: RankContext,
        what: str,
        tensors: Sequence[torch.Tensor],
        read: Callable[[], _T],
    ) -> _T:
        """What ``read()`` finds in ``tensors``, their pending graph run before.

        If it has collectives in it, all that is pending on the device is run, as by
        ``torch_xla.sync()``. Were the tensors alone, the collectives would stay pending, and the
        next program would have them once more: a loop that reads without a sync would be a longer
        program every time. Without collectives only the tensors are computed, so a rank that prints
        a finished loss alone waits for nobody.
        """
        self.before_read(context, what, tensors)
        with self._reading:
            return read()

    def before_read(self, context: RankContext, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Computes ``tensors``, so that they can be read at leisure; see :meth:`fetch`."""
        if self._collectives_in(context, tensors):
            self._run_all(
                context,
                _arrival(what, "read", context.pending),
                lambda: xlac.sync_live_tensors(str(context.device), [], False),
            )
            xlac.set_collective_token(str(context.device), None)
        elif tensors and any(xlac.are_pending(list(tensors))):
            with self._reading:  # whoever comes second finds the program of the first
                self._sync_multi(list(tensors), [], wait=False, sync_xla_data=True)
        # Two ranks that read what is still being computed crashed torch_xla now and then (about
        # once in 2000 launches on a loaded machine), so values are waited for, and read in turn.
        self._wait_for_device(context)

    def exchange(self, context: RankContext, what: str, key: tuple, payload: Any) -> list:
        """Every rank's ``payload``, by rank."""
        return self.barrier.meet(
            context.rank, Arrival(what, ("exchange", *key), call_site.here(), payload=payload)
        )

    def finish(self, context: RankContext) -> None:
        """The rank's function returned: waits for the others.

        What it left pending is not run: which tensors are still alive, and so the program, would
        depend on the garbage collector of the process.
        """
        arrival = _arrival("its function returned", "finish", context.pending)
        self.barrier.meet(context.rank, arrival)

    def materialize(self, context: RankContext, results: Sequence[torch.Tensor]) -> None:
        """Gives a rank's results their values, in one program for all of them."""
        if results:
            self.sync_tensors(context, "its function returned", results)

    def stop_if_deadlocked(self) -> None:
        """Stops ranks that wait for one whose program nobody else will run.

        An operator that torch_xla computes on the CPU cuts the graph inside of XLA, where no hook
        sees it. If its program has collectives and all other ranks wait at the barrier, none of
        them can start a program that this one could meet.
        """
        unseen, waiting = [], self.barrier.waiting()
        for rank, (started, expected) in enumerate(
            zip(self.gate.started, self.expected, strict=True)
        ):
            if started > expected and self.gate.is_waiting(rank):
                unseen.append(rank)
            elif rank not in waiting or started < expected:
                return
        if unseen:
            self.barrier.stop_different(
                dict.fromkeys(unseen, "an operator that reads pending collectives")
            )

    def _wait_for_device(self, context: RankContext) -> None:
        xm.wait_device_ops([self._real_devices[context.rank]])

    def _run_all(
        self, context: RankContext, arrival: Arrival, dispatch: Callable[[], None]
    ) -> None:
        # Alive until the program is dispatched, so that all that is pending is part of it.
        end = None if context.order is None else context.order.end()
        self._together(context, arrival, dispatch)
        del end
        context.forget()

    def _together(
        self, context: RankContext, arrival: Arrival, dispatch: Callable[[], None]
    ) -> None:
        # One program with collectives at a time: the next has the same channel ids, and XLA would
        # let a device join a collective of both.
        self._wait_for_device(context)
        turn = _Turn() if context.rank == 0 else None
        turn = self.barrier.meet(context.rank, replace(arrival, payload=turn))[0]
        leads = context.rank == 0
        self.dispatching[context.rank] = True
        # Not one more than before: an operator may have run a program that no hook has seen.
        if context.order is not None:
            self.expected[context.rank] = self.gate.started[context.rank] + 1
        try:
            # From here to the end of this block nothing may stop a rank: others wait for it.
            if leads:
                turn.take(dispatch)
            elif turn.follow():
                dispatch()
        finally:
            self.dispatching[context.rank] = False
        # Nobody goes on, and perhaps blocks with the GIL held, before everybody has dispatched.
        self.barrier.meet(context.rank, Arrival(arrival.what, "dispatched", arrival.where))

    def _collectives_in(
        self, context: RankContext, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[str, str], ...]:
        if not context.pending or not tensors:
            return ()
        text = xlac.graph_text(list(tensors))
        return tuple((kind, shape) for shape, kind in _COLLECTIVE_NODE.findall(text))


def _start_of_program(gate: StartGate, context: RankContext) -> Callable[[], torch.Tensor]:
    def start() -> torch.Tensor:
        # Data, not a constant: all ranks share one program.
        rank = torch.tensor([context.rank], dtype=torch.int32)
        sent: Any = xm.send_cpu_data_to_device([rank], context.device)
        return gate.wait_for_all(sent[0])

    return start


class _Turn:
    """Rank 0 dispatches a program before the others do."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._dispatched = False

    def take(self, dispatch: Callable[[], None]) -> None:
        """Rank 0's turn."""
        try:
            dispatch()
            self._dispatched = True
        finally:
            self._over.set()

    def follow(self) -> bool:
        """Waits for rank 0's turn to be over; false if its dispatch failed."""
        self._over.wait()
        return self._dispatched


def _arrival(what: str, kind: str, pending: list[Collective]) -> Arrival:
    key = (kind, tuple(collective.key for collective in pending))
    return Arrival(what, key, call_site.here(), tuple(pending))


def wait_for_programs(failed: bool) -> None:
    """Waits until no program runs: the gate of the next launch must not meet one of this.

    ``failed``: of a launch that failed, whose programs may have ended with an error, too.
    """
    for device in xm.xla_real_devices():
        with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
            xm.wait_device_ops([device])


def drop_pending(contexts: Sequence[RankContext]) -> None:
    """Takes unfinished collectives off the devices at the end of a launch.

    Their values can never be computed. Tensors that the program still holds are filled with NaN
    (integers: zero); anything else that is pending becomes a placeholder.
    """
    devices = {str(context.device) for context in contexts if context.pending}
    for context in contexts:
        context.forget()
        xlac.set_collective_token(str(context.device), None)
    if not devices:
        return
    gc.collect()
    lost = [
        value
        for value in gc.get_objects()
        if issubclass(type(value), torch.Tensor)  # isinstance would ask objects for __class__
        # Not value.device: tensors that autograd is done with are undefined and have none.
        and value.is_xla
        and not has_own_operators(type(value))  # no stand-in
        and str(value.device) in devices
        and xlac.are_pending([value])[0]
    ]
    for device in sorted(devices):
        xlac.forget_pending(device)
    for tensor in lost:
        fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        with torch._C.DisableTorchFunctionSubclass():  # of a sharded tensor what is here
            value = torch.full(tensor.shape, fill, dtype=tensor.dtype).to(tensor.device)
        xlac.replace_data(tensor, value)
