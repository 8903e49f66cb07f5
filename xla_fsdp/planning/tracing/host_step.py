"""The part of a step that runs on the host: its memory is counted, and it does not run.

With ``cpu_offload`` the optimizer has tensors on the CPU. A plan needs no values of them, and they
may be larger than the memory of this machine. So each has two elements while an optimizer steps.
The size of the state that the optimizer makes for two elements gives the size for all elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...offload import FETCHED_BYTES, STAGED_BYTES
from ...sharding.cpu_offload import HostShard
from ...sharding.sharded_parameter import local, on_local_parts
from ...sharding.sharded_tensor import ShardedTensor
from ...sharding.state import FSDPState, unique_units
from ..records import HostNeeds

_FEW = 2


class HostSteps:
    """Measures the optimizer state on the host.

    Attributes:
        state: its bytes.
    """

    def __init__(self) -> None:
        self.state = 0
        self._known: dict[HostShard, int] = {}
        self._kept: list[tuple[Optimizer, HostShard, torch.Tensor, Any, Any]] = []

    def shrink(self, optimizer: Optimizer) -> None:
        """Gives each parameter of ``optimizer`` on the host two elements, and no state."""
        if getattr(optimizer, "knows_shards", False):  # stores bfloat16 shards in another form
            return
        for group in optimizer.param_groups:
            for shard in group["params"]:
                if not isinstance(shard, HostShard) or not local(shard).numel():
                    continue
                state = optimizer.state.pop(shard, None)
                with on_local_parts():
                    grad = shard.grad
                    self._kept.append((optimizer, shard, shard.detach(), grad, state))
                    shard.grad = None
                    few = torch.zeros(_FEW, dtype=shard.dtype, device="cpu")
                    torch.Tensor.data.__set__(shard, few)  # type: ignore[attr-defined]
                    shard.grad = None if grad is None else torch.zeros_like(few)

    def restore(self) -> None:
        """Reverts :meth:`shrink`, and counts the state that the optimizer made."""
        while self._kept:
            optimizer, shard, values, grad, state = self._kept.pop()
            made = optimizer.state.pop(shard, {})
            made = {k: local(v) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
            size = 0
            for value in made.values():
                if isinstance(value, torch.Tensor):
                    each = values.numel() if value.numel() == _FEW else 1
                    size += each * value.dtype.itemsize
            self._known[shard] = max(size, self._known.get(shard, 0))
            with on_local_parts():
                shard.grad = None
                torch.Tensor.data.__set__(shard, values)  # type: ignore[attr-defined]
                shard.grad = grad
            if state is not None:
                optimizer.state[shard] = state
        self.state = sum(self._known.values())


def units_of(roots: Iterable[nn.Module]) -> list[FSDPState]:
    """The units in ``roots``, each once."""
    return list(dict.fromkeys(unit for root in roots for unit in unique_units(root)))


def offloaded_tensors(roots: Iterable[nn.Module]) -> list[ShardedTensor]:
    """The tensors of ``roots`` that are on the host, each once."""
    found = {
        id(tensor): tensor
        for unit in units_of(roots)
        for tensor in unit.stored
        if tensor.copy is not None
    }
    return list(found.values())


def gradients_for_host(roots: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Gradients that the next program computes on the device and sends to the host."""
    hosts = [unit.gradients.host for unit in units_of(roots)]
    return [grad for host in hosts if host is not None for _, grad in host.pending]


def needs_of(tensors: list[ShardedTensor], sent: list[int], state: int) -> HostNeeds | None:
    """The host memory of one rank; ``None`` if ``tensors`` is empty.

    Args:
        sent: bytes of every gradient that the device sends in a step.
        state: bytes of the optimizer state.
    """
    if not tensors:
        return None
    sizes = [(local(t.shard).numel(), t.shard.dtype.itemsize, t.copy) for t in tensors]
    copies = [count * copy.dtype.itemsize for count, _, copy in sizes if copy is not None]
    trained = [t.shard for t in tensors if t.shard.requires_grad]
    largest = max(*copies, *sent, 0, 0)
    return HostNeeds(
        shards=sum(count * size for count, size, _ in sizes),
        gradients=sum(local(shard).numel() * shard.dtype.itemsize for shard in trained),
        state=state,
        # A shard in the communication dtype and its copy in the runtime, or pieces of gradients.
        buffers=min(2 * max(largest, STAGED_BYTES, FETCHED_BYTES), 2 * sum(copies)),
        to_host=sum(sent),
        to_device=sum(copies),
    )
