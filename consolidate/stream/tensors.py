"""The tensors of the result, and their bytes in pieces, read ahead by a thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ..format.dtypes import copy_into, dtype_name, tensor_bytes

PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class ResultTensor:
    """One tensor of a file.

    Attributes:
        read: ``read(begin, end)`` returns the flattened elements ``begin .. end``, contiguous.
        origin: the dtype that ``read`` returns, None if the tensor is not cast.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
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
        return self.name, dtype_name(self.dtype, repr(self.name)), self.shape

    def pieces(self) -> Iterator[memoryview]:
        origin = self.origin or self.dtype
        step = PIECE_BYTES // max(self.itemsize, origin.itemsize)
        for begin in range(0, self.numel, step):
            piece = self.read(begin, min(begin + step, self.numel))
            if origin is not self.dtype:
                piece = copy_into(torch.empty(len(piece), dtype=self.dtype), piece)
            yield tensor_bytes(piece)


def pieces(tensors: Iterable[ResultTensor]) -> Iterator[memoryview]:
    return (piece for tensor in tensors for piece in tensor.pieces())


def pump(produce: Iterable[memoryview], consume: Callable[[memoryview], object]) -> None:
    """Calls ``consume`` with every piece, in order, while another thread produces the next one.

    An exception in either thread is raised here. The thread has ended when this returns.
    """
    remaining = iter(produce)

    def read() -> memoryview | None:
        return next(remaining, None)

    with ThreadPoolExecutor(1, "read ahead") as reader:
        ahead = reader.submit(read)
        while (piece := ahead.result()) is not None:
            ahead = reader.submit(read)
            consume(piece)
