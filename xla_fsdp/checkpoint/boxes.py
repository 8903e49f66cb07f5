"""Runs of elements of a flattened tensor as boxes, as torch.distributed.checkpoint wants them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """A box of a tensor whose elements follow each other in the flattened tensor from ``begin``."""

    offsets: torch.Size
    sizes: torch.Size
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.sizes.numel()


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """The elements ``begin .. end`` of the flattened tensor, as boxes in order.

    At most two for every dimension, less one: of a matrix the end of a row, whole rows, and the
    beginning of a row. Elements 2 to 9 of shape ``(3, 4)`` are 2 of row 0, row 1, and 1 of row 2.
    """
    return [
        Box(torch.Size(offsets), torch.Size(sizes), at)
        for offsets, sizes, at in _boxes(tuple(shape), begin, end)
    ]


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple, tuple, int]]:
    if begin >= end:
        return
    if not shape:
        yield (), (), 0
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        yield from _in_row(last, inner, begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _in_row(first - 1, inner, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * len(inner)), (last - first, *inner), first * row
    yield from _in_row(last, inner, 0, end - last * row)


def _in_row(number: int, inner: tuple[int, ...], begin: int, end: int) -> Iterator[tuple]:
    for offsets, sizes, at in _boxes(inner, begin, end):
        yield (number, *offsets), (1, *sizes), number * math.prod(inner) + at
