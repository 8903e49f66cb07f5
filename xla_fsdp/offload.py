"""Parameters, gradients and the optimizer update on the host: docs/how-to/cpu-offload.md.

A program's arguments and results are in device memory, so streaming runs one program for each
unit's forward and backward; at most two units' copies and three units' gradients are on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from . import xlac
from .collectives.host_data import as_data, fake_cpu_tensor
from .ranks.autograd_thread import in_backward
from .ranks.rank import is_simulated_rank
from .sharding.cpu_offload import HostShard
from .sharding.gradients import accumulate, accumulate_sums, hooks_of
from .sharding.layout import computed_in
from .sharding.sharded_parameter import local, on_local_parts
from .sharding.state import FSDPState
from .tree import map_tensors, tensors_in


def attach(unit: FSDPState) -> None:
    """Prepares the host shards of ``unit``, if it offloads.

    Raises:
        ValueError: only one of two wrappers that share a parameter (tied weights) offloads it.
    """
    how = unit.options.cpu_offload
    offloads = how is not None
    for tensor in unit.stored:
        if isinstance(tensor.shard, HostShard) is not offloads:
            ours, theirs = ("is", "not") if offloads else ("not", "is")
            raise ValueError(
                f"parameter {tensor.key!r} is shared with another wrapper (tied weights), and "
                f"{ours} offloaded here but {theirs} there. Pass the same cpu_offload to both"
            )
    if how is None:
        return
    uploads = Uploads(unit.world.device)
    gradients = unit.host_gradients = HostGradients(unit.world.device)
    if how.stream:
        unit.stream = Stream(unit, gradients)
    for tensor in unit.stored:
        shard = tensor.shard
        assert isinstance(shard, HostShard)
        if tensor.copy is None:
            computed = None if tensor.wide else unit.options.compute_dtype
            tensor.copy = ShardCopy(shard, computed, uploads, gradients)
        elif tensor.copy.dtype is not tensor.spec.compute_dtype(unit.options.compute_dtype):
            tensor.copy = ShardCopy(shard, None, uploads, gradients)
        tensor.widens = True


# Bytes in transfer before the next send waits, unless one tensor has more.
STAGED_BYTES = 1 << 28


class Uploads:
    """At most ``most`` bytes are in transfer."""

    def __init__(self, device: torch.device, most: int = STAGED_BYTES) -> None:
        self.device = device
        self.most = most
        self.sent = 0
        self._under_way = 0

    def send(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns during the transfer, when ``value`` may be changed."""
        size = value.numel() * dtype.itemsize
        if self._under_way and self._under_way + size > self.most:
            self._under_way = 0
            if not is_simulated_rank():  # wait for all earlier ones: fetch one more
                xlac.copy_to_host([as_data(torch.zeros(1, device="cpu"), self.device)])
        self._under_way += size
        self.sent += size
        if is_simulated_rank():
            return as_data(fake_cpu_tensor(value.shape, dtype), self.device)
        return as_data(value.to(dtype), self.device)


class ShardCopy:
    """The device copy of one shard in its compute ``dtype``, see :func:`computed_in`."""

    def __init__(
        self,
        shard: HostShard,
        dtype: torch.dtype | None,
        uploads: Uploads,
        gradients: HostGradients,
    ) -> None:
        self._shard = shard
        self._dtype = dtype
        self.uploads = uploads
        self.gradients = gradients
        # May be older than the shard; None if dropped.
        self.held: torch.Tensor | None = None
        self._made_of: object = None

    @property
    def dtype(self) -> torch.dtype:
        return computed_in(self._shard.dtype, self._dtype)

    def drop(self) -> None:
        self.held = self._made_of = None

    def send(self) -> torch.Tensor:
        """The copy on the device; a transfer starts if the shard has changed."""
        state = self._shard.state()
        if self.held is None or state != self._made_of:
            self.held = None  # so that only one is in device memory
            self.held = self.uploads.send(local(self._shard), self.dtype)
            self._made_of = state
        return self.held

    def __getstate__(self) -> dict[str, Any]:
        """For deep copies: without the tensor of another shard."""
        return {**vars(self), "held": None, "_made_of": None}


FETCHED_BYTES = 1 << 28

Pending = tuple[torch.Tensor, torch.Tensor]


class HostGradients:
    def __init__(self, device: torch.device, most: int = FETCHED_BYTES) -> None:
        self.device = device
        self.most = most
        self.pending: list[Pending] = []
        # On the host, of shards with hooks: see `accumulate_sums`.
        self.hooked: list[Pending] = []
        self.received = 0
        self._told: int | None = None  # the backward that will call `arrive`

    def take(self, shard: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds ``grad``, on the device, to the gradient of ``shard`` when the backward ends."""
        assert isinstance(shard, HostShard)
        self.pending.append((shard, grad))
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._told):
            self._told = task
            # After the callbacks of all units: full parameters would be results of the program.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self.arrive))

    def forget(self) -> None:
        self.pending.clear()
        self.hooked.clear()

    def arrive(self) -> None:
        """Runs the traced program, and gives every shard its gradient."""
        self.fetch()
        accumulate_sums(self.take_hooked())

    def take_hooked(self) -> list[Pending]:
        taken, self.hooked = self.hooked, []
        return taken

    def fetch(self) -> None:
        """Runs the traced program, and gives every shard without hooks its gradient."""
        self._told = None
        if not self.pending:
            return
        xlac.start_program(self.device)
        self.depart(lambda give: give())

    def depart(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Makes ``run`` give every shard its gradient, once their program has started."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        self.received += sum(_bytes(one) for one in pending)
        if is_simulated_rank():
            for shard, _ in pending:  # values do not exist in a plan
                if shard.grad is None:
                    with on_local_parts():
                        shard.grad = fake_cpu_tensor(shard.shape, shard.dtype)
            return
        run(lambda: self._give(pending))

    @torch.no_grad()
    def _give(self, pending: list[Pending]) -> None:
        """Fetches one piece while the piece before is added up; empties ``pending``."""
        pieces = self._pieces(pending)
        with ThreadPoolExecutor(1, "fetch gradients") as pool:
            following = pool.submit(_copy_to_host, pieces.pop())
            while pieces:
                fetched = following.result()
                following = pool.submit(_copy_to_host, pieces.pop())
                self._add_up(*fetched)
            self._add_up(*following.result())

    def _add_up(self, shards: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        for shard, value in zip(shards, values, strict=True):
            value = value.to(shard.dtype)
            self.hooked.append((shard, value)) if any(hooks_of(shard)) else accumulate(shard, value)

    def _pieces(self, pending: list[Pending]) -> list[list[Pending]]:
        pieces: list[list[Pending]] = []
        size = 0
        while pending:
            one = pending.pop()
            if not pieces or size + _bytes(one) > self.most:
                pieces.append([])
                size = 0
            pieces[-1].insert(0, one)
            size += _bytes(one)
        return pieces


def _bytes(one: Pending) -> int:
    return one[1].numel() * one[1].dtype.itemsize


def _copy_to_host(piece: list[Pending]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shards, values = [shard for shard, _ in piece], [value for _, value in piece]
    piece.clear()  # frees them on the device, together with `values`
    return shards, xlac.copy_to_host(values)


# Units whose gradients may be in transfer at the same time.
_FETCHING = 2


class Traffic:
    """Transfers and programs of a model's streamed units. Its thread lives during a backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fetching: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    def __deepcopy__(self, memo: dict) -> Traffic:
        return memo.setdefault(id(self), Traffic(self.device))

    def cut(self) -> None:
        """Starts the traced program, after the previous one is done and its memory free."""
        if not is_simulated_rank():
            xm.wait_device_ops(xm.xla_real_devices([self.device]))
        xlac.start_program(self.device)

    def fetch(self, task: Callable[[], None]) -> None:
        """Queues ``task`` for one thread: two units may have gradients of the same shard."""
        while len(self._fetching) >= _FETCHING:
            self._fetching.pop(0).result()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "stream gradients")
        self._fetching.append(self._pool.submit(task))

    def wait(self) -> None:
        """Waits for all gradients."""
        try:
            while self._fetching:
                self._fetching.pop(0).result()
        finally:
            self._fetching.clear()
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


class Stream:
    """Decides when the copies of one unit are sent and freed; ``traffic`` becomes the root's."""

    def __init__(self, unit: FSDPState, gradients: HostGradients) -> None:
        self._unit = unit
        self._gradients = gradients
        self.traffic = Traffic(unit.world.device)

    def mark_backward_end(self, inputs: Any) -> Any:
        """``inputs`` of the forward, with a graph node that runs when their gradients exist."""
        if self._unit.is_root or not torch.is_grad_enabled():
            return inputs
        tensors = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        if not tensors:  # this unit's backward ends with the model's
            return inputs
        passed = dict(zip(tensors, _FirstNode.apply(self, *tensors.values()), strict=True))
        return map_tensors(lambda t: passed.get(id(t), t), inputs)

    def end_forward(self) -> None:
        # All forwards use the root's copies; after a recomputation, the backward follows.
        if not (self._unit.is_root or in_backward()):
            self._unit.order.end_forward()
            self.traffic.cut()
            self._drop()

    def end_backward(self) -> None:
        # Else full parameters and gradients would be results of the program.
        self._unit.leave_backward()
        self.traffic.cut()
        self._drop()
        self._gradients.depart(self.traffic.fetch)

    def forget(self) -> None:
        with contextlib.suppress(Exception):  # the user has seen the error
            self.traffic.wait()

    def _drop(self) -> None:
        for tensor in self._unit.stored:
            if tensor.copy is not None:
                tensor.copy.drop()


class _FirstNode(torch.autograd.Function):
    """The unit's oldest node: autograd runs it last, when all parameters have their gradients."""

    @staticmethod
    def forward(ctx: Any, stream: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stream = stream
        # Copies, because a forward could not change views in place. On XLA they take no memory.
        return tuple(torch.view_copy(tensor, tensor.shape) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.stream.end_backward()
        return None, *grads
