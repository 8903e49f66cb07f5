"""Sharded training equals unsharded training: losses, gradients, clipped norms and weights.

The model (``zoo.py``) has shared, frozen, unused, uneven, 0-d, empty and tiny parameters; every
case trains it for some steps on real ranks and once on plain torch; in float64 for five.
"""

import itertools
import math

import parity
import pytest
import torch
from covering import covering, pairs_of
from parity import Case

WRAPPINGS = ["root", "nested", "auto", "flat", "dim0"]
SLOW = pytest.mark.slow
ACCUMULATIONS = ["none", "no_sync", "plain"]
PRODUCT = list(itertools.product(WRAPPINGS, [True, False], [False, True], ACCUMULATIONS))
COVERING = covering(PRODUCT, lambda cell: pairs_of(tuple(enumerate(cell))))
SINGLY = covering(COVERING, lambda cell: set(enumerate(cell)))


def cross() -> list:
    """The product; by default cells that show every setting, and in CI every pair of settings.
    Optimizer, norm, ranks and way of tracing go round."""
    rotation = zip(
        itertools.cycle(["sgd", "adamw"]),
        itertools.cycle([2.0, 1.0, 2.0, math.inf, 2.0]),
        itertools.cycle([2, 3, 2, 4, 3, 2, 1]),  # each rank traces for itself
        itertools.cycle([True, False]),
    )
    cells = [*COVERING, *(cell for cell in PRODUCT if cell not in COVERING)]
    found = []
    for cell, (optimizer, norm, ranks, as_on_tpu) in zip(cells, rotation, strict=False):
        wrapping, reshard, *how = cell
        options = {} if reshard else {"reshard_after_forward": False}
        case = Case(wrapping, *how, optimizer, norm, options=options, as_on_tpu=as_on_tpu)
        marks = pytest.mark.slow if cell in COVERING else pytest.mark.full
        marks = () if cell in SINGLY else marks
        found.append((ranks, pytest.param(case, ranks, marks=marks, id=f"{case}-{ranks}ranks")))
    # By ranks, else processes of ranks would be started over and over.
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def unsharded():
    """``unsharded(case, train)``: what ``train(case)`` returns, trained once for all like it."""
    known = {}

    def run(case: Case, train) -> parity.Run:
        case = parity.unsharded_case(case)
        key = repr(case)  # its options can not be hashed
        if key not in known:
            known[key] = train(case)
        return known[key]

    return run


@pytest.fixture
def check(run_ranks, unsharded):
    def run(case: Case, ranks: int, rtol: float, atol: float) -> None:
        sharded = parity.merge(run_ranks(parity.one_rank, ranks, case))
        parity.assert_equal(sharded, unsharded(case, parity.unsharded), rtol, atol)

    return run


@pytest.mark.parametrize("case, ranks", cross())
def test_float32(check, case, ranks):
    check(case, ranks, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "wrapping",
    [
        "nested",
        *(pytest.param(wrapping, marks=SLOW) for wrapping in ("flat", "dim0")),
        *(pytest.param(wrapping, marks=pytest.mark.full) for wrapping in ("root", "auto")),
    ],
)
def test_float64_to_the_last_digits(run_ranks, unsharded, wrapping):
    case = Case(wrapping, True, "no_sync", "adamw", dtype=torch.float64, as_on_tpu=True, steps=5)
    sharded = parity.merge(run_ranks(parity.one_rank, 3, case))
    reference = unsharded(case, lambda like: run_ranks(parity.unsharded_on_xla, 1, like)[0])
    parity.assert_equal(sharded, reference, rtol=1e-11, atol=1e-13)


NARROW = list(
    itertools.product(["nested", "flat", "dim0"], [torch.bfloat16, torch.float16], [0, 1])
)

# Each dtype, and each way to reduce.
NARROW_SINGLY = covering(covering(NARROW), lambda case: set(case[1:]))


@pytest.mark.parametrize(
    "wrapping, compute_dtype, fp32_reduce_scatter",
    [
        case if case in NARROW_SINGLY else pytest.param(*case, marks=SLOW)
        for case in covering(NARROW)
    ],
)
def test_narrow_compute_dtype(check, wrapping, compute_dtype, fp32_reduce_scatter):
    options = {"compute_dtype": compute_dtype, "fp32_reduce_scatter": bool(fp32_reduce_scatter)}
    case = Case(wrapping, True, "no_sync", options=options)
    # Two ways of rounding to 8 or 11 bits, two steps on.
    tolerance = 0.06 if compute_dtype is torch.bfloat16 else 0.01
    check(case, 4, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters(check, dtype):
    case = Case("nested", False, "none", dtype=dtype, steps=3, one_program=False)
    check(case, 3, rtol=0.1, atol=0.1)


def test_switches_do_not_change_results(check):
    options = {
        "optimization_barrier_in_forward": False,
        "optimization_barrier_in_backward": False,
        "sync_on_finalization": True,
        "disable_reshard_on_root": False,
        "execute_sharding_on_init": False,
        "pin_layout_in_collective_ops": False,
        "reduce_scatter_bucket_size_mb": 8,
        "coalesce_all_gather_ops": True,
    }
    check(Case("nested", True, options=options, one_program=False), 4, rtol=2e-4, atol=2e-5)
