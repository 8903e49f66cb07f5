"""Small training steps, compared with torch_xla's FSDP class and with plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as InTree

from ..ranks.rank import current_rank
from ..wrapper import XlaFullyShardedDataParallel as FSDP
from .nets import SEED, Net, Size, tokens
from .records import StepRun

OURS, IN_TREE = "xla_fsdp", "in-tree"
ON_TPU = {
    "4 x 1024": Size(blocks=4, width=1024, vocabulary=8192, sequence=512, batch=8),
    "8 x 1024": Size(blocks=8, width=1024, vocabulary=8192, sequence=512, batch=8),
    "4 x 2048": Size(blocks=4, width=2048, vocabulary=8192, sequence=1024, batch=8),
}
ON_CPU = {
    "2 x 64": Size(blocks=2, width=64, vocabulary=67, sequence=16, batch=2),
    "3 x 64": Size(blocks=3, width=64, vocabulary=67, sequence=16, batch=2),
    "2 x 128": Size(blocks=2, width=128, vocabulary=67, sequence=32, batch=2),
}
_WARM, _ROUNDS, _STEPS = 3, 3, 4


class Lane:
    """A model wrapped with one of the two FSDP classes, and its optimizer."""

    def __init__(self, name: str, size: Size) -> None:
        torch.manual_seed(SEED)
        self.name = name
        wrap = _class(name)
        self.model: Any = wrap(Net(size, wrap))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        whole = tokens(size, xr.world_size(), 0)
        self.mine = whole.chunk(xr.world_size())[xr.global_ordinal()].to(torch_xla.device())

    def trace(self) -> torch.Tensor:
        """Traces a step, which the next sync runs; returns its loss."""
        loss = self.model(self.mine)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _class(name: str) -> Callable[[nn.Module], nn.Module]:
    if name == OURS:
        return lambda module: FSDP(module, compute_dtype=torch.bfloat16)
    # The in-tree class hangs on CPU ranks with pinned layouts, which are its default.
    pinned = current_rank() is None
    return lambda module: InTree(
        module, compute_dtype=torch.bfloat16, pin_layout_in_collective_ops=pinned
    )


def planned(size: Size) -> Callable[[], object]:
    """The argument of ``xla_fsdp.plan`` that plans the same step."""
    return lambda: Lane(OURS, size).trace()


def peaks(sizes: Mapping[str, Size]) -> dict[str, int | None]:
    """The peak bytes of the device for a few steps of each size, with xla_fsdp's class.

    The runtime only has the peak since it started. So call this before anything that needs more
    memory, with sizes in increasing order.
    """
    found = {}
    for name, size in sizes.items():
        lane = Lane(OURS, size)
        _warm(lane, {})
        found[name] = _peak()
        del lane
    return found


def run(name: str, size: Size, peak: int | None) -> Iterator[StepRun]:
    """Trains with both classes, in turns; call on every rank.

    ``peak``: the result of :func:`peaks` for this size.
    """
    lanes = [Lane(OURS, size), Lane(IN_TREE, size)]
    found: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for lane in lanes:
        _warm(lane, found)
    for turn in range(_ROUNDS):
        for lane in lanes if turn % 2 == 0 else lanes[::-1]:
            seconds, host = _timed(lane)
            found[lane.name][1].append(seconds)
            found[lane.name][2].append(host)
    for lane in lanes:
        losses, seconds_of, host_of = found[lane.name]
        yield StepRun(
            name,
            lane.name,
            statistics.median(seconds_of),
            statistics.median(host_of),
            tuple(losses),
            peak if lane.name == OURS else None,
        )


def _warm(lane: Lane, found: dict) -> None:
    losses = []
    for _ in range(_WARM):
        loss = lane.trace()
        torch_xla.sync()
        losses.append(loss.item())
    found[lane.name] = losses, [], []


def _timed(lane: Lane) -> tuple[float, float]:
    """The seconds of a step, and the seconds of this process to trace it."""
    xm.wait_device_ops([])
    host, began = 0.0, time.perf_counter()
    for _ in range(_STEPS):
        tracing = time.perf_counter()
        loss = lane.trace()  # kept alive until the sync: one output less is another program
        host += time.perf_counter() - tracing
        torch_xla.sync()
    xm.wait_device_ops([])
    took = time.perf_counter() - began
    del loss
    return took / _STEPS, host / _STEPS


def _peak() -> int | None:
    """The peak bytes of the device since the process started; ``None`` if unknown."""
    try:
        return int(xm.get_memory_info(torch_xla.device())["peak_bytes_used"])  # type: ignore
    except (RuntimeError, KeyError, TypeError):
        return None
