"""Small training steps, compared with torch_xla's FSDP class and with plans, and their model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as InTree

from ..ranks.rank import current_rank
from ..wrapper import XlaFullyShardedDataParallel as FSDP
from .measurements import StepRun

SEED = 11


@dataclass(frozen=True)
class Size:
    """``batch``: sequences for each rank."""

    blocks: int
    width: int
    vocabulary: int
    sequence: int
    batch: int


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width + 3), nn.Linear(4 * width + 3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        heads = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (b, h, s, d)
        mixed = (q @ k.transpose(-2, -1) * (w // self.heads) ** -0.5).softmax(-1) @ v
        x = x + self.mix(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Returns the mean cross entropy of tokens ``(b, s)``; one weight is frozen."""

    def __init__(
        self,
        size: Size,
        wrap: Callable[[nn.Module], nn.Module] = lambda block: block,
        join: Callable[[list[nn.Module]], nn.Module] = lambda blocks: nn.Sequential(*blocks),
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Parameter(0.02 * torch.randn(size.sequence, size.width))
        self.gain = nn.Parameter(torch.full((size.width,), 1.5), requires_grad=False)
        blocks = [Block(size) for _ in range(size.blocks)]
        self.blocks = join([wrap(block) for block in blocks])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.embed(tokens) * self.gain + self.place))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def global_batch(size: Size, ranks: int, number: int) -> torch.Tensor:
    """The global batch of a step, ``(ranks * batch, sequence)``, on the CPU."""
    generator = torch.Generator().manual_seed(1000 + number)
    shape = ranks * size.batch, size.sequence
    return torch.randint(size.vocabulary, shape, generator=generator)


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
    def __init__(self, name: str, size: Size) -> None:
        torch.manual_seed(SEED)
        self.name = name
        wrap = _class(name)
        self.model: Any = wrap(Net(size, wrap))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        whole = global_batch(size, xr.world_size(), 0)
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
    # The in-tree class hangs on CPU ranks with pinned layouts, its default.
    pinned = current_rank() is None
    return lambda module: InTree(
        module, compute_dtype=torch.bfloat16, pin_layout_in_collective_ops=pinned
    )


def planned(size: Size) -> Callable[[], object]:
    """The argument of ``xla_fsdp.plan`` that plans the same step."""
    return lambda: Lane(OURS, size).trace()


def peaks(sizes: Mapping[str, Size]) -> dict[str, int | None]:
    """The peak bytes of the device for a few steps of each size, with xla_fsdp's class.

    The runtime has only the peak since it started: call this first, sizes in increasing order.
    """
    found = {}
    for name, size in sizes.items():
        lane = Lane(OURS, size)
        _warm(lane)
        found[name] = _peak()
        del lane
    return found


def time_both_classes(name: str, size: Size, peak: int | None) -> Iterator[StepRun]:
    """Trains with both classes, in turns; call on every rank."""
    lanes = [Lane(OURS, size), Lane(IN_TREE, size)]
    losses = [_warm(lane) for lane in lanes]
    times: list[list[tuple[float, float]]] = [[], []]
    for turn in range(_ROUNDS):
        for number in (0, 1) if turn % 2 == 0 else (1, 0):
            times[number].append(_timed(lanes[number]))
    for lane, own_losses, own_times in zip(lanes, losses, times, strict=True):
        seconds, host = (statistics.median(each) for each in zip(*own_times, strict=True))
        own_peak = peak if lane.name == OURS else None
        yield StepRun(name, lane.name, seconds, host, tuple(own_losses), own_peak)


def _warm(lane: Lane) -> list[float]:
    losses = []
    for _ in range(_WARM):
        loss = lane.trace()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def _timed(lane: Lane) -> tuple[float, float]:
    """Seconds of a step, and of tracing it."""
    xm.wait_device_ops([])
    host, began = 0.0, time.perf_counter()
    for _ in range(_STEPS):
        tracing = time.perf_counter()
        loss = lane.trace()  # kept until the sync: one output less is another program
        host += time.perf_counter() - tracing
        torch_xla.sync()
    xm.wait_device_ops([])
    took = time.perf_counter() - began
    del loss
    return took / _STEPS, host / _STEPS


def _peak() -> int | None:
    """Since the process started; ``None`` if unknown."""
    try:
        return int(xm.get_memory_info(torch_xla.device())["peak_bytes_used"])  # type: ignore
    except (RuntimeError, KeyError, TypeError):
        return None
