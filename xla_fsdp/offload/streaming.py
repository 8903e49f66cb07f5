"""Units whose parameters are on the device only while they compute: docs/how-to/cpu-offload.md,
"Stream parameters".

A program of torch_xla takes its arguments from the device's memory and leaves its results there
when it is over. So that less than the whole model is there, the step is cut into programs, one for
each unit's forward and one for its backward. While one runs, the host traces the next, casts the
copies of its shards and sends them, and fetches the gradients of the one before. At most two units'
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
from ..ranks.rank import is_pretending
from ..sharding.state import FSDPState
from ..tree import map_tensors, tensors_in
from .gradients import HostGradients

# Units whose gradients may be on their way to the host.
_FETCHING = 2


class Traffic:
    """What the streamed units of one model have under way.

    Lifetime of the thread: from the first gradients of a backward to its end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fetching: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    def __deepcopy__(self, memo: dict) -> Traffic:
        """A copy of a model is not under way."""
        return memo.setdefault(id(self), Traffic(self.device))

    def cut(self) -> None:
        """Runs what was traced, once what ran before is over and its memory free."""
        if not is_pretending():
            xm.wait_device_ops(xm.xla_real_devices([self.device]))
        xlac.start_program(self.device)

    def fetch(self, task: Callable[[], None]) -> None:
        """Has ``task`` run behind those before it, which one thread does: two units may have
        gradients of one shard."""
        while len(self._fetching) >= _FETCHING:
            self._fetching.pop(0).result()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "stream gradients")
        self._fetching.append(self._pool.submit(task))

    def wait(self) -> None:
        """Until every gradient is on the host.

        Raises:
            Exception: what a hook on a shard raised.
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
    """When the copies of one unit come and go.

    Attributes:
        traffic: of the model, once its root is known; the unit's own before.
    """

    def __init__(self, unit: FSDPState, gradients: HostGradients) -> None:
        self._unit = unit
        self._gradients = gradients
        self.traffic = Traffic(unit.world.device)

    @property
    def _passing(self) -> bool:
        """Whether the unit's copies go now: not the root's, in which the others compute, and not
        in a recomputation, whose backward follows at once."""
        return not self._unit.is_root and torch._C._current_graph_task_id() == -1

    def entering(self, inputs: Any) -> Any:
        """``inputs`` of the forward, with a graph that knows when their gradients are there."""
        if self._unit.is_root or not torch.is_grad_enabled():
            return inputs
        tensors = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        if not tensors:  # then the backward's end is this unit's
            return inputs
        passed = dict(zip(tensors, _Entrance.apply(self, *tensors.values()), strict=True))
        return map_tensors(lambda t: passed.get(id(t), t), inputs)

    def forward_over(self) -> None:
        """The unit has computed: that runs, and its copies go."""
        if self._passing:
            self._unit.order.end_forward()
            self.traffic.cut()
            self._drop()

    def backward_over(self) -> None:
        """All of the unit's gradients were traced, and those of its inputs."""
        # What is full, or waited for, would be a result of the program.
        self._unit.leave_backward()
        self.traffic.cut()
        self._drop()
        self._gradients.depart(self.traffic.fetch)

    def arrive(self) -> None:
        """The backward through the model is over."""
        self.traffic.wait()

    def forget(self) -> None:
        """A backward failed."""
        with contextlib.suppress(Exception):  # it was told already
            self.traffic.wait()

    def _drop(self) -> None:
        for tensor in self._unit.stored:
            if tensor.copy is not None:
                tensor.copy.drop()


class _Entrance(torch.autograd.Function):
    """What a unit's forward starts from. It is the unit's oldest node, so autograd comes to it when
    all others of the unit are done: parameters have had their gradients."""

    @staticmethod
    def forward(ctx: Any, stream: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stream = stream
        # No views, which a forward could not change in place. On XLA a copy takes no memory.
        return tuple(torch.view_copy(tensor, tensor.shape) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.stream.backward_over()
        return None, *grads
