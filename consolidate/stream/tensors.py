"""Tensors of the result: where their elements come from, and their bytes in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..format.dtypes import dtype_name, tensor_bytes
from .pump import AHEAD

# Bytes read, handed over and written at a time.
PIECE_BYTES = 1 << 22
# Elements; torch shares out work on more than twice as many among threads.
_SERIAL = 1 << 14
# Elements begin .. end, flattened; in the buffer, or in memory of their own.
Read = Callable[[int, int, torch.Tensor], torch.Tensor]


class Ring:
    """Buffers that are used again and again, so that memory neither grows nor has to be cleared.

    One is free again when as many others have been taken as can be waiting in :func:`~.pump.pump`,
    being written, and being filled.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(AHEAD + 3)]
        self._scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._taken = 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A buffer for ``count`` elements."""
        self._taken += 1
        buffer = self._buffers[self._taken % len(self._buffers)]
        return buffer[: count * dtype.itemsize].view(dtype)

    def scratch(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The same for what is used at once."""
        return self._scratch[: count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. origin: its dtype in the source, None if that is the same."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Read
    origin: torch.dtype | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def described(self) -> tuple[str, str, tuple[int, ...]]:
        """For the header of a safetensors file."""
        return self.name, dtype_name(self.dtype, repr(self.name)), self.shape

    def pieces(self, ring: Ring) -> Iterator[memoryview]:
        """Its bytes in order, each valid until the ring comes round."""
        origin = self.origin or self.dtype
        step = PIECE_BYTES // max(self.itemsize, origin.itemsize)
        for begin in range(0, self.numel, step):
            end = min(begin + step, self.numel)
            out = ring.take(self.dtype, end - begin)
            if origin is self.dtype:
                out = self.read(begin, end, out)
            else:
                cast(self.read(begin, end, ring.scratch(origin, end - begin)), out)
            yield tensor_bytes(out.detach().reshape(-1))


def pieces(tensors: Iterable[Stored]) -> Iterator[memoryview]:
    """Their bytes, one after the other."""
    ring = Ring()
    for tensor in tensors:
        yield from tensor.pieces(ring)


def cast(values: torch.Tensor, out: torch.Tensor) -> None:
    """Fills ``out`` with ``values`` in its dtype."""
    # In parts that torch works on in this thread: its other threads would wait for each other,
    # spinning, on the cores that read and write.
    for begin in range(0, len(values), _SERIAL):
        out[begin : begin + _SERIAL].copy_(values[begin : begin + _SERIAL])


def all_of(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    read: Callable[[], torch.Tensor],
) -> Stored:
    """A tensor that is read as a whole, and cast if need be: a buffer."""
    kept: list[torch.Tensor] = []

    def some(begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        # Not once for every piece of it, nor kept for longer than until the last.
        if not kept:
            kept.append(read().reshape(-1))
        cast(kept[0][begin:end], out)
        if end == math.prod(shape):
            kept.clear()
        return out

    return Stored(name, dtype, shape, some)


def part(name: str, dtype: torch.dtype, begin: int, end: int, read: Read) -> Stored:
    """Elements ``begin .. end`` of a larger tensor, as one of one dimension."""

    def some(low: int, high: int, out: torch.Tensor) -> torch.Tensor:
        return read(begin + low, begin + high, out)

    return Stored(name, dtype, (end - begin,), some)
