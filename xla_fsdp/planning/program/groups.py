"""Which devices take part in a collective together."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from ...tpu.slices import Groups
from .hlo import Instruction
from .shapes import numbers

_GROUP = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def read_groups(instruction: Instruction) -> Groups:
    """The groups of a collective, the (source, target) pairs of a collective-permute.

    Empty if all devices form one group. Raises ValueError for a notation it does not know.
    """
    pairs = instruction.attribute("source_target_pairs")
    return parse_groups(instruction.attribute("replica_groups") or "" if pairs is None else pairs)


def parse_groups(text: str) -> Groups:
    """Groups from either notation, ``{{0,1},{2,3}}`` or ``[2,2]<=[2,2]T(1,0)``.

    The second: count from 0, shape the numbers like the list after ``<=``, transpose, and cut
    the result into rows.
    """
    text = text.strip()
    iota = _IOTA.fullmatch(text)
    if iota:
        rows, width = _split(iota[1])
        dims = numbers(iota[2])
        order = numbers(iota[3]) if iota[3] else tuple(range(len(dims)))
        if sorted(order) != list(range(len(dims))) or math.prod(dims) != rows * width:
            raise ValueError(f"replica groups {text!r} do not fit together")
        flat = _transposed(dims, order)
        return tuple(tuple(flat[r * width : (r + 1) * width]) for r in range(rows))
    if text and not re.fullmatch(r"\{(\s*\{[\d,\s]*\}\s*,?)*\s*\}", text):
        raise ValueError(f"replica groups in an unknown notation: {text[:120]!r}")
    groups = (numbers(g) for g in _GROUP.findall(text[1:-1]))
    return tuple(g for g in groups if g)


def _split(text: str) -> tuple[int, int]:
    """Number of groups and their size; one number alone is one group."""
    *most, last = numbers(text)
    return math.prod(most), last


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    ranges = [range(dims[d]) for d in order]
    return [
        sum(i * strides[d] for i, d in zip(index, order, strict=True))
        for index in itertools.product(*ranges)
    ]
