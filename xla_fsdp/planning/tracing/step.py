"""Traces the caller's training step as one rank of a slice."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch_xla.runtime as xr
from torch import nn

from ...collectives.random_state import preserve_random_state
from ...offload import FETCHED_BYTES, STAGED_BYTES, ShardCopy
from ...ranks.cpu import call_site
from ...ranks.cpu.runtime import ONE_AT_A_TIME
from ...ranks.cpu.session import is_xla
from ...ranks.rank import current_rank
from ...sharding.sharded_parameter import local
from ...sharding.sharded_tensor import ShardedTensor
from ...sharding.state import FSDPState, unique_units
from ...tpu.topology import Slice
from ..records import HostNeeds
from .live import LiveTensors, inspect_tensor
from .naming import Naming, plain_name
from .simulated_rank import SimulatedRank, StepTraced, drop_pending_of_autograd, fill_pending
from .steady import SteadyOptimizers, named_state, state_tensors
from .traced import StepBoundary, TracedProgram
from .units import TracedUnit, traced_units, zero_bound

# More calls of models and optimizers without a sync than in any step.
_MANY_CALLS = 1000


@dataclass(frozen=True)
class TracedStep:
    """The traced step of one rank.

    Attributes:
        bound: the bytes that plain ZeRO-3 sends; ``None`` without a wrapper.
        reads, sized_by_data: as in ``SimulatedRank``.
        programs_before: earlier programs without an optimizer step, which are not planned.
        has_optimizer: whether parameters are updated.
        with_closure: whether an optimizer got a closure; then the program creates its state.
        untrained: parameters of optimizers that got no gradient.
        trained: how many parameters of optimizers require a gradient.
        host: if the optimizer steps on the host; then ``program`` sends it the last gradients.
        parts: all programs of the step, in order, if units are streamed.
    """

    program: TracedProgram
    bound: int | None
    reads: tuple[str, ...]
    programs_before: int
    has_optimizer: bool
    with_closure: bool = False
    sized_by_data: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    trained: int = 0
    host: HostNeeds | None = None
    units: tuple[TracedUnit, ...] = ()
    parts: tuple[TracedPart, ...] = ()

    @property
    def fingerprint(self) -> str:
        if not self.parts:
            return self.program.fingerprint
        together = "".join(part.program.fingerprint for part in self.parts)
        return hashlib.sha256(together.encode()).hexdigest()


def trace_step(
    step: Callable[[], Any],
    rank: int,
    size: int,
    slice: Slice | None = None,
    arguments: str | None = None,
) -> TracedStep:
    """Calls ``step()`` as rank ``rank`` of ``size``, on ``slice``, and returns its program.

    It is the first program with an optimizer step; optimizer state is among its arguments. Tensors
    on the device, small parameters and buffers on the host, and optimizers from outside of ``step``
    get their values back; learning rate schedulers stay advanced. ``arguments``:
    ``LIBTPU_INIT_ARGS`` of a rank there; default: that of this process.

    Raises RuntimeError inside a rank of a launch, in SPMD mode, or while this process launches
    ranks or plans; ValueError if nothing is traced on the XLA device.
    """
    if current_rank() is not None:
        raise RuntimeError(
            "plan or tune was called inside a rank of a launch; call it from the main program"
        )
    if xr.is_spmd():
        raise RuntimeError(
            "plan traces one program a rank, and SPMD mode is one program for all devices; "
            "do not call torch_xla.runtime.use_spmd() (or unset XLA_USE_SPMD)"
        )
    if not ONE_AT_A_TIME.acquire(blocking=False):
        raise RuntimeError(
            "this process is already launching ranks or planning; wait for that, and do not call "
            "plan inside a step that is being planned"
        )
    try:
        with _state_restored() as live:
            run = _StepTrace(live)
            simulated = SimulatedRank(rank, size, run.cut, run.read, slice, arguments)
            with run.naming.active(), run.optimizers.active(), simulated:
                try:
                    run.start()
                    result = step()  # stays referenced, as in a training loop
                    run.end()
                    del result
                except StepTraced:
                    pass
            traced = run.finish(simulated)
            run.forget()
        return traced
    finally:
        ONE_AT_A_TIME.release()


class _FirstProgram(NamedTuple):
    """Of a loop whose second one is planned, if there is one; fields as in ``_StepTrace``."""

    found: TracedProgram | None
    sent: list[int]
    bound: int | None
    units: tuple[TracedUnit, ...]


class _StepTrace:
    def __init__(self, live: LiveTensors) -> None:
        self.live = live
        self.naming = Naming(self.begin)
        self.optimizers = SteadyOptimizers(self.naming, self.state_made, self.repeat)
        self.boundary: StepBoundary | None = None
        self._synced: StepBoundary | None = None  # at the last sync, or before the step
        self._computes_before = False  # the first call of a module
        self._first: _FirstProgram | None = None
        self.found: TracedProgram | None = None
        self.bound: int | None = None
        self.units: tuple[TracedUnit, ...] = ()
        self.has_optimizer = False
        self.programs = 0
        # Optimizer steps before the first read that followed one.
        self.steps_read: int | None = None
        self.over = False
        self.calls = 0  # of roots and optimizers since the last cut
        self.parts: list[TracedPart] = []
        self.sent: list[int] = []  # bytes of each gradient

    def start(self) -> None:
        """Called before the step, and where it syncs before its first module is called."""
        self._synced = _filled_boundary(self.live.all())
        self.live.note_models()

    def begin(self) -> StepBoundary:
        """The first module is called, or the first optimizer steps.

        What was traced since the last sync belongs to the program, unless it builds a model. In a
        loop it may be state that is made once, so that the next program is the one to plan.
        """
        self._count()
        if self.boundary is None:
            assert self._synced is not None, "start was called"
            tensors = self.live.all()
            self._computes_before = self._synced.has_pending(tensors)
            builds = self._computes_before and self.live.has_new_model()
            self.boundary = _filled_boundary(tensors) if builds else self._synced
        return self.boundary

    def state_made(self, optimizer: torch.optim.Optimizer) -> None:
        boundary = self.begin()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if is_xla(p)]
        boundary.note([inspect_tensor(t) for t in [*parameters, *state_tensors(optimizer)]])

    def cut(self) -> None:
        """Called where a real run would execute the program."""
        self.calls = 0
        if self.over:
            raise StepTraced  # the caller's code caught the first one
        if self.boundary is None:
            self.start()
            return
        self._lower()
        if self.has_optimizer and self._computes_before and not self.parts:
            self._trace_next()
        elif self.has_optimizer or (self._first and self._first.found is not self.found):
            self._stop()
        self.boundary = _filled_boundary(self.live.all())
        if self.parts:
            drop_pending_of_autograd()

    def _trace_next(self) -> None:
        self._first = _FirstProgram(self.found, self.sent, self.bound, self.units)
        self._computes_before = self.has_optimizer = False
        self.steps_read = None
        self.programs -= 1
        self.optimizers.stepped.clear()

    def read(self) -> None:
        """Called where a real run would execute only what one value depends on."""
        if self.boundary is None or self.optimizers.warming_up or self.over:
            return
        if self.optimizers.stepped and self.steps_read is None:
            # In a loop without sync more steps may follow.
            self._lower()
            self.programs -= 1
            self.steps_read = len(self.optimizers.stepped)

    def repeat(self) -> None:
        """An optimizer steps again, without a sync since its last step."""
        self._count()
        if self.steps_read is not None:
            self._stop()

    def _count(self) -> None:
        self.calls += 1
        if self.calls > _MANY_CALLS:
            raise RuntimeError(
                f"the step has called its model and optimizers {_MANY_CALLS} times without a sync, "
                f"now at {call_site.here()}: all calls would be one program without an end. "
                "Call torch_xla.sync() after the optimizer's step, and return"
            )

    def end(self) -> None:
        """The step returned without a sync: its program is all that it traced."""
        steps = len(self.optimizers.stepped)
        if self.boundary is None or self.over or self.steps_read == steps:
            return
        if steps or self.found is None:
            self._lower()

    def _stop(self) -> None:
        self.over = True
        raise StepTraced

    def finish(self, simulated: SimulatedRank) -> TracedStep:
        if self._first is not None and not self.has_optimizer:  # no loop
            self.found, self.sent, self.bound, self.units = self._first
            self.has_optimizer = True
        if self.found is None:
            raise ValueError(
                "the step traced nothing on the XLA device: it must build the model there, and run "
                "one training step. It may call torch_xla.sync() after the optimizer's step"
            )
        owners = self._owners()
        return TracedStep(
            program=self.found,
            bound=self.bound,
            units=self.units,
            reads=tuple(simulated.reads),
            programs_before=0 if self.parts else max(self.programs - 1, 0),
            has_optimizer=self.has_optimizer,
            with_closure=self.optimizers.with_closure,
            sized_by_data=tuple(simulated.sized_by_data),
            untrained=tuple(owners.get(p, "a parameter") for p in self.optimizers.untrained),
            host=self._host_needs(),
            parts=_with_transfers(self.parts),
            trained=sum(
                p.requires_grad
                for optimizer in self.optimizers.all
                for group in optimizer.param_groups
                for p in group["params"]
            ),
        )

    def _host_needs(self) -> HostNeeds | None:
        tensors = offloaded_tensors(self.naming.roots)
        if not tensors:
            return None
        sizes = [(local(t.shard).numel(), t.shard.dtype.itemsize, t.copy) for t in tensors]
        copies = [count * copy.dtype.itemsize for count, _, copy in sizes if copy is not None]
        trained = [t.shard for t in tensors if t.shard.requires_grad]
        largest = max(*copies, *self.sent, 0, 0)
        return HostNeeds(
            shards=sum(count * size for count, size, _ in sizes),
            gradients=sum(local(shard).numel() * shard.dtype.itemsize for shard in trained),
            state=self.optimizers.host.state,
            # A shard in its communication dtype and the runtime's copy, or pieces of gradients.
            buffers=min(2 * max(largest, STAGED_BYTES, FETCHED_BYTES), 2 * sum(copies)),
            to_host=sum(self.sent),
            to_device=sum([part.to_device for part in self.parts] or copies),
        )

    def forget(self) -> None:
        self.boundary = self._synced = self._first = None
        self.naming.clear()
        self.optimizers.all.clear()
        self.optimizers.stepped.clear()

    def _lower(self) -> None:
        assert self.boundary is not None, "the step has not begun"
        tensors = self.live.all()
        program = self.boundary.lower(tensors, self._names(self.boundary))
        backward, self.naming.in_backward = self.naming.in_backward, False
        units = units_of(self.naming.roots)
        hosts = [unit.host_gradients for unit in units if unit.host_gradients is not None]
        sent = [t.numel() * t.dtype.itemsize for host in hosts for _, t in host.pending]
        # Parameters of streamed units are on the device only while the unit computes.
        streamed = any(unit.stream is not None for unit in units)
        if streamed and program is not None and not self.optimizers.stepped:
            self._add_part(program, tensors, sum(sent), backward)
        elif self.sent and not sent:  # in the optimizer step on the host
            self.has_optimizer = self.has_optimizer or bool(self.optimizers.stepped)
            return
        if program is None:
            return
        self.programs += 1
        self.found, self.sent = program, [*self.sent, *sent] if streamed else sent
        # Optimizers that are no torch class update parameters as well.
        trained = {plain_name(n) for root in self.naming.roots for n, _ in root.named_parameters()}
        updated = any(program.arguments[number] in trained for number in program.donated)
        self.has_optimizer = bool(self.optimizers.stepped) or updated
        self.bound = zero_bound(self.naming.roots)
        self.units = traced_units(self.naming.roots)

    def _add_part(
        self, program: TracedProgram, tensors: Iterable[torch.Tensor], to_host: int, backward: bool
    ) -> None:
        """Equal programs become the same object."""
        assert self.boundary is not None
        same = (p.program for p in self.parts if p.program.fingerprint == program.fingerprint)
        other_programs = self.boundary.bytes_of_others(
            [one for one in map(inspect_tensor, tensors) if not one.pending]
        )
        copies = (tensor.copy for tensor in offloaded_tensors(self.naming.roots))
        uploads = {copy.uploads for copy in copies if isinstance(copy, ShardCopy)}
        sent = sum(one.sent for one in uploads) - sum(part.to_device for part in self.parts)
        self.parts.append(TracedPart(next(same, program), other_programs, sent, to_host, backward))

    def _owners(self) -> dict[torch.Tensor, str]:
        owners: dict[torch.Tensor, str] = {}
        for root in self.naming.roots:
            for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
                owners.setdefault(tensor, plain_name(name))
        return owners

    def _names(self, boundary: StepBoundary) -> dict[int, str]:
        owners = self._owners()
        named = [(name, tensor) for tensor, name in owners.items()]
        for one in offloaded_tensors(self.naming.roots):
            if one.copy is not None and one.copy.held is not None:
                named.append((owners.get(one.shard, one.key), one.copy.held))
        for optimizer in self.optimizers.all:
            named += named_state(optimizer, owners)
        # A tensor updated in place is pending; its buffer was noted when the step began.
        names: dict[int, str] = {}
        for name, tensor in named:
            handle = boundary.handle_of(tensor) if is_xla(tensor) else None
            if handle is not None:
                names.setdefault(handle, name)
        return names


def _filled_boundary(tensors: list[torch.Tensor]) -> StepBoundary:
    """As after a sync: no tensor waits for a computation."""
    fill_pending(tensors)
    return StepBoundary(tensors)


@contextlib.contextmanager
def _state_restored() -> Iterator[LiveTensors]:
    live = LiveTensors()
    try:
        with torch.random.fork_rng(devices=[]), preserve_random_state():
            yield live
    finally:
        live.restore()
        live.close()


@dataclass(frozen=True)
class TracedPart:
    """One program of a step, with bytes.

    ``other_programs``: tensors on the device that it neither reads nor computes. ``to_device``:
    shards sent for it. ``to_host``: its gradients for the host.
    """

    program: TracedProgram
    other_programs: int
    to_device: int
    to_host: int
    backward: bool


def _with_transfers(parts: list[TracedPart]) -> tuple[TracedPart, ...]:
    """Adds the copies for the next program and the gradients of the previous two."""
    return tuple(
        replace(
            part,
            other_programs=part.other_programs
            + sum(after.to_device for after in parts[number + 1 : number + 2])
            + sum(before.to_host for before in parts[max(number - 2, 0) : number]),
        )
        for number, part in enumerate(parts)
    )


def units_of(roots: Iterable[nn.Module]) -> list[FSDPState]:
    return list(dict.fromkeys(unit for root in roots for unit in unique_units(root)))


def offloaded_tensors(roots: Iterable[nn.Module]) -> list[ShardedTensor]:
    stored = (tensor for unit in units_of(roots) for tensor in unit.stored)
    return list(dict.fromkeys(tensor for tensor in stored if tensor.copy is not None))
