"""``reshard_after_forward=<int>``: gathers of the backward stay within that many ranks."""

from __future__ import annotations

import collections
import itertools
import re

import parity
import pytest
import torch
from parity import Case
from test_special_uses import inputs, mlp, trace_as_on_tpu, wrapped
from torch import nn

WRAPPINGS = ["root", "nested", "auto", "flat", "dim0"]

_rotation = zip(
    itertools.cycle(["none", "no_sync", "plain"]),
    itertools.cycle([True, False]),
)
CASES = [
    Case(
        wrapping,
        checkpoint,
        accumulation,
        # The root would keep its parameters: here it does as the others.
        options={"reshard_after_forward": 2, "disable_reshard_on_root": False},
        as_on_tpu=as_on_tpu,
        steps=4,
    )
    for (wrapping, checkpoint), (accumulation, as_on_tpu) in zip(
        itertools.product(WRAPPINGS, [False, True]), _rotation, strict=False
    )
]


def every_case(rank, cases):
    return [parity.one_rank(rank, case) for case in cases]


@pytest.mark.parametrize("ranks", [4])
def test_trains_like_plain_torch(run_ranks, ranks):
    found = run_ranks(every_case, ranks, CASES)
    known: dict[str, parity.Run] = {}
    for case, *per_rank in zip(CASES, *found, strict=True):
        plain = parity.unsharded_case(case)
        reference = known.setdefault(repr(plain), None) or parity.unsharded(plain)
        known[repr(plain)] = reference
        parity.assert_equal(parity.merge(per_rank), reference, rtol=2e-4, atol=2e-5)
