"""Splits a range of a flattened tensor into index ranges, the chunks of
torch.distributed.checkpoint.

An index range is a rectangular block of a tensor: the offset and size of each dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch


class IndexRange(NamedTuple):
    """A block whose elements are consecutive in the flattened tensor, the first at ``begin``."""

    offsets: torch.Size
    sizes: torch.Size
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.sizes.numel()


def split_index_range(shape: tuple[int, ...], begin: int, end: int) -> list[IndexRange]:
    """Splits the range ``begin <= i < end`` of a flattened tensor into index ranges, in order.

    A tensor of ``n`` dimensions needs at most ``2 * n - 1`` of them. For a matrix these are the end
    of one row, the complete rows, and the beginning of another row: with shape ``(3, 4)``, the
    range 2 to 9 is two elements of row 0, all of row 1, and one element of row 2.
    """
    return [
        IndexRange(torch.Size(offsets), torch.Size(sizes), at)
        for offsets, sizes, at in _split(tuple(shape), begin, end)
    ]


def _split(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple, tuple, int]]:
    if begin >= end:
        return
    if not shape:
        yield (), (), 0
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-begin // row), end // row  # complete rows
    if first > last:
        yield from _split_row(last, inner, begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _split_row(first - 1, inner, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * len(inner)), (last - first, *inner), first * row
    yield from _split_row(last, inner, 0, end - last * row)


def _split_row(number: int, inner: tuple[int, ...], begin: int, end: int) -> Iterator[tuple]:
    for offsets, sizes, at in _split(inner, begin, end):
        yield (number, *offsets), (1, *sizes), number * math.prod(inner) + at
