"""The tensors of the result: how to read their elements, and their bytes in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..format.dtypes import dtype_name, tensor_bytes
from .pump import AHEAD

# Bytes that are read and written at a time.
PIECE_BYTES = 1 << 22
# Elements that are cast at a time. torch uses several threads for more than twice this number.
_SERIAL = 1 << 14
# Reads the flattened elements begin .. end. Returns the given buffer, or another tensor.
Read = Callable[[int, int, torch.Tensor], torch.Tensor]


class Ring:
    """A ring of buffers that are reused, so that no memory is allocated while reading.

    A buffer may be reused after all others were taken. Their number covers the buffers that wait
    in :func:`~.pump.pump`, the one being written and the one being filled.
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
        """A buffer that is valid only until the next call."""
        return self._scratch[: count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class ResultTensor:
    """One tensor of a file. ``origin``: its dtype in the source, None if it is not cast."""

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
        """Name, dtype and shape, for the header of a safetensors file."""
        return self.name, dtype_name(self.dtype, repr(self.name)), self.shape

    def pieces(self, ring: Ring) -> Iterator[memoryview]:
        """The bytes of the tensor in pieces. A piece is valid until the ring reuses its buffer."""
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


def pieces(tensors: Iterable[ResultTensor]) -> Iterator[memoryview]:
    """The bytes of the tensors in pieces, one tensor after the other."""
    ring = Ring()
    for tensor in tensors:
        yield from tensor.pieces(ring)


def cast(values: torch.Tensor, out: torch.Tensor) -> None:
    """Fills ``out`` with ``values``, cast to its dtype."""
    # Cast small parts, which torch does in this thread. Its thread pool would busy-wait on the
    # cores that read and write.
    for begin in range(0, len(values), _SERIAL):
        out[begin : begin + _SERIAL].copy_(values[begin : begin + _SERIAL])


def all_of(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    read: Callable[[], torch.Tensor],
) -> ResultTensor:
    """A tensor that is read completely, and cast if necessary: a buffer of the model."""
    kept: list[torch.Tensor] = []

    def some(begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        # Read the tensor once, and free it after the last piece.
        if not kept:
            kept.append(read().reshape(-1))
        cast(kept[0][begin:end], out)
        if end == math.prod(shape):
            kept.clear()
        return out

    return ResultTensor(name, dtype, shape, some)


def part(name: str, dtype: torch.dtype, begin: int, end: int, read: Read) -> ResultTensor:
    """The elements ``begin .. end`` of a larger tensor, as a one-dimensional tensor."""

    def some(low: int, high: int, out: torch.Tensor) -> torch.Tensor:
        return read(begin + low, begin + high, out)

    return ResultTensor(name, dtype, (end - begin,), some)
