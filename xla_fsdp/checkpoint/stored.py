"""Tensors that lie somewhere else, any run of whose elements can be read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla

from ..consolidate.format.dtypes import DTYPES, dtype_name, tensor_bytes
from ..world import World

# How much rank 0 sends at a time. Sizes are powers of two, so that few programs serve all tensors.
_MOST_WORDS = 1 << 22
_FEWEST_WORDS = 1 << 8
_LOWEST = torch.iinfo(torch.int32).min


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor.

    Attributes:
        read: gives elements ``begin .. end`` of the flattened tensor, one-dimensional, on the CPU.
        collective: every rank must call ``read``, in the same order, even if it needs nothing.
        here: all of it is in this rank's memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]
    collective: bool = False
    here: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        """A tensor in memory, or mapped from a file."""

        def read(begin: int, end: int) -> torch.Tensor:
            return tensor.detach().reshape(-1)[begin:end].cpu()

        return cls(tuple(tensor.shape), tensor.dtype, read, here=True)


def is_dense(value: Any) -> bool:
    """Whether ``value`` is a tensor whose elements can be read one after the other."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    return value.layout is torch.strided and not value.is_quantized


def describe(tensor: torch.Tensor, where: str) -> list[Any]:
    """Shape and dtype for other ranks; :class:`UnsupportedValueError` for unusual dtypes."""
    return [list(tensor.shape), dtype_name(tensor.dtype, where)]


def sent_by_first_rank(world: World, described: list[Any], tensor: torch.Tensor | None) -> Stored:
    """A tensor that only rank 0 has; the others give its description and ``None``.

    ``world``: all ranks.
    """
    shape, dtype = tuple(described[0]), DTYPES[described[1]]

    def read(begin: int, end: int) -> torch.Tensor:
        size = dtype.itemsize
        own = None if tensor is None else tensor.detach().cpu().contiguous().reshape(-1)
        data = _send(world, own, math.prod(shape) * size, begin * size, end * size)
        return data.view(dtype)

    return Stored(shape, dtype, read, collective=True)


def _send(world: World, own: torch.Tensor | None, size: int, begin: int, end: int) -> torch.Tensor:
    """Bytes ``begin .. end`` of the ``size`` that rank 0 has as ``own``, on every rank."""
    kept = torch.empty(end - begin, dtype=torch.uint8)
    for low in range(0, size, 4 * _MOST_WORDS):
        high = min(low + 4 * _MOST_WORDS, size)
        words = _FEWEST_WORDS
        while 4 * words < high - low:
            words *= 2
        # The maximum with the lowest number is exact, whatever the bits mean.
        block = torch.full((words,), _LOWEST, dtype=torch.int32)
        if own is not None:
            block.view(torch.uint8)[: high - low] = torch.frombuffer(
                tensor_bytes(own)[low:high], dtype=torch.uint8
            )
        arrived = world.all_reduce_max(block.to(world.device), "from rank 0")
        torch_xla.sync(wait=True)  # one block at a time on the device
        first, last = max(low, begin), min(high, end)
        if first < last:
            kept[first - begin : last - begin] = arrived.cpu().view(torch.uint8)[
                first - low : last - low
            ]
    return kept
