"""Moves gradients of shards from the device to the host at the end of a backward.

The results of a program exist only when all of it has run. So the backward ends with a cut: the
program starts, and when it is done, gradients are fetched in pieces. While one piece is fetched,
the piece before is added up on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from .. import xlac
from ..collectives.host_data import fake_cpu_tensor
from ..ranks.rank import is_simulated_rank
from ..sharding.cpu_offload import HostShard
from ..sharding.sharded_parameter import accumulate, on_local_parts

# Bytes that are fetched at a time, unless one tensor has more.
FETCHED_BYTES = 1 << 28

Pending = tuple[torch.Tensor, torch.Tensor]


class HostGradients:
    """The gradients of one unit that go to the host.

    Attributes:
        pending: shards and their gradients, on the device.
        received: bytes received so far.
    """

    def __init__(self, device: torch.device, most: int = FETCHED_BYTES) -> None:
        self.device = device
        self.most = most
        self.pending: list[Pending] = []
        self.received = 0
        self._told: int | None = None  # the backward at whose end `arrive` is called

    def take(self, shard: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds ``grad`` to that of ``shard`` once the backward is over."""
        assert isinstance(shard, HostShard)  # the object that the optimizer has
        self.pending.append((shard, grad))
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._told):
            self._told = task
            torch.autograd.Variable._execution_engine.queue_callback(self.arrive)

    def forget(self) -> None:
        """Drops gradients that a failed backward left."""
        self.pending.clear()

    def arrive(self) -> None:
        """Runs the traced program, and gives every shard its gradient, in the shard's dtype."""
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
            _set_fake_gradients([shard for shard, _ in pending])
            return
        run(lambda: self._give(pending))

    @torch.no_grad()
    def _give(self, pending: list[Pending]) -> None:
        for shards, values in self._fetched(pending):
            for shard, value in zip(shards, values, strict=True):
                accumulate(shard, value.to(shard.dtype))

    def _fetched(
        self, pending: list[Pending]
    ) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Yields shards and their gradients on the CPU, in pieces; empties ``pending``."""
        pieces = self._pieces(pending)
        if len(pieces) == 1:
            yield _copy_to_host(pieces.pop())
            return
        with ThreadPoolExecutor(1, "fetch gradients") as pool:
            following = pool.submit(_copy_to_host, pieces.pop())
            while pieces:
                fetched = following.result()
                following = pool.submit(_copy_to_host, pieces.pop())
                yield fetched
            yield following.result()

    def _pieces(self, pending: list[Pending]) -> list[list[Pending]]:
        """Pieces of ``pending``, the last gradients first."""
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


def _set_fake_gradients(shards: list[torch.Tensor]) -> None:
    """Gives each shard a gradient without values, for a plan."""
    for shard in shards:
        if shard.grad is None:
            with on_local_parts():
                shard.grad = fake_cpu_tensor(shard.shape, shard.dtype)
