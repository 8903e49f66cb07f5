"""Units whose parameters are on the device only while they compute: docs/how-to/cpu-offload.md,
"Stream parameters".

A torch_xla program takes its arguments from device memory and leaves its results there. So that
device memory need not hold the entire model, the step is cut into programs, one for each unit's
forward and one for its backward. While one program runs, the host traces the next, casts and sends
the copies of its shards, and fetches the gradients of the program before. At most two units'
copies, and three units' gradients, are on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch.autograd.function import once_differentiable

from .. import xlac
from ..ranks.rank import is_simulated_rank
from ..sharding.state import FSDPState
from ..tree import map_tensors, tensors_in
from .gradients import HostGradients

# The number of units whose gradients may be in transfer to the host.
_FETCHING = 2


class Traffic:
    """The current transfers and programs of the streamed units of one model.

    Lifetime of the thread: from the first gradients of a backward to its end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fetching: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    def __deepcopy__(self, memo: dict) -> Traffic:
        """A copied model has no current transfers."""
        return memo.setdefault(id(self), Traffic(self.device))

    def cut(self) -> None:
        """Starts the traced program, after the previous one is done and its memory free."""
        if not is_simulated_rank():
            xm.wait_device_ops(xm.xla_real_devices([self.device]))
        xlac.start_program(self.device)

    def fetch(self, task: Callable[[], None]) -> None:
        """Queues ``task`` for the thread that runs all tasks in order: two units may have gradients
        of the same shard."""
        while len(self._fetching) >= _FETCHING:
            self._fetching.pop(0).result()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "stream gradients")
        self._fetching.append(self._pool.submit(task))

    def wait(self) -> None:
        """Waits until every gradient is on the host.

        Raises:
            Exception: a hook on a shard raised it.
        """
        try:
            while self._fetching:
                self._fetching.pop(0).result()
        finally:
            self._fetching.clear()
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


class Stream:
    """Decides when the copies of one unit are sent and freed.

    Attributes:
        traffic: of the model, once its root is known; before that a separate one.
    """

    def __init__(self, unit: FSDPState, gradients: HostGradients) -> None:
        self._unit = unit
        self._gradients = gradients
        self.traffic = Traffic(unit.world.device)

    @property
    def _is_temporary_copy(self) -> bool:
        """Whether to free the unit's copies now: not those of the root, during which the other
        units compute, and not in a recomputation, whose backward follows immediately."""
        return not self._unit.is_root and torch._C._current_graph_task_id() == -1

    def mark_backward_end(self, inputs: Any) -> Any:
        """``inputs`` of the forward, with a graph node that runs when their gradients exist."""
        if self._unit.is_root or not torch.is_grad_enabled():
            return inputs
        tensors = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        if not tensors:  # then this unit's backward ends with the model's
            return inputs
        passed = dict(zip(tensors, _FirstNode.apply(self, *tensors.values()), strict=True))
        return map_tensors(lambda t: passed.get(id(t), t), inputs)

    def end_forward(self) -> None:
        """After the unit's forward: runs its program, and frees its copies."""
        if self._is_temporary_copy:
            self._unit.order.end_forward()
            self.traffic.cut()
            self._drop()

    def end_backward(self) -> None:
        """After all gradients of the unit and of its inputs were traced: runs the program."""
        # Full parameters and pending gradients would be results of the program.
        self._unit.leave_backward()
        self.traffic.cut()
        self._drop()
        self._gradients.depart(self.traffic.fetch)

    def arrive(self) -> None:
        """Called when the backward through the model is done."""
        self.traffic.wait()

    def forget(self) -> None:
        """Called after a backward failed."""
        with contextlib.suppress(Exception):  # the user has already seen the error
            self.traffic.wait()

    def _drop(self) -> None:
        for tensor in self._unit.stored:
            if tensor.copy is not None:
                tensor.copy.drop()


class _FirstNode(torch.autograd.Function):
    """The first node of a unit's forward. It is the unit's oldest node, so autograd runs it after
    all others of the unit: all parameters have their gradients by then."""

    @staticmethod
    def forward(ctx: Any, stream: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stream = stream
        # No views, which a forward could not change in place. On XLA a copy takes no memory.
        return tuple(torch.view_copy(tensor, tensor.shape) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.stream.end_backward()
        return None, *grads
