"""Finds attention in a traced program."""

from __future__ import annotations

import re
from math import prod

from ...tpu.chips import LANES, Chip

_HEAD_DIM, _LARGEST_HEAD_DIM = 64, 256  # as layers/attention.py, which needs torch
_STEP = re.compile(
    r"= \w+\[([\d,]+)\]\S* (?:dot\(.*lhs_batch_dims=\{\d|(exponential)\().*"
    r'op_name="(?:\w+\[[^\]"]*\][\d.]*/)*forward\['
)


def attention_shapes(traced: str) -> tuple[int, int, int] | None:
    """(queries, keys, head dimension) of the first attention in the forward.

    Attention is two batched matmuls with an exponential of the first result's size between them.
    """
    scores: tuple[int, ...] = ()
    softmax = False
    for line in traced.splitlines():
        found = _STEP.search(line)
        if found is None:
            continue
        dims = tuple(int(number) for number in found[1].split(","))
        if found[2]:
            softmax = softmax or prod(dims) == prod(scores)
        elif softmax:
            return scores[-2], scores[-1], dims[-1]
        else:
            scores = dims
    return None


def why_no_kernel(traced: str, chip: Chip) -> str:
    """Why attention cannot use a kernel, or "" if it can or if there is none."""
    found = attention_shapes(traced)
    if found is None:
        return ""
    *lengths, dim = found
    if not chip.attention_kernel:
        return f"the kernel cannot be compiled for {chip.family}"
    for length in lengths:
        if length % LANES:
            more = length + -length % LANES
            return f"{length} tokens are no multiple of {LANES}; {more} would be"
    if dim % _HEAD_DIM or dim > _LARGEST_HEAD_DIM:
        return f"the head dimension {dim} is no multiple of {_HEAD_DIM} up to {_LARGEST_HEAD_DIM}"
    return ""
