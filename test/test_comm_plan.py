"""The communication plan: data that is computed without tensors, for any number of ranks."""

import itertools

import pytest
import torch
from on_ranks import on_each_rank

from xla_fsdp import BackwardPrefetch, FSDPOptions
from xla_fsdp.collectives.order import Event, Wait
from xla_fsdp.collectives.routes import Routes, attributes_of, routes_for
from xla_fsdp.collectives.world import World
from xla_fsdp.sharding.comm_plan import Divisors, plan_gathers, plan_reductions
from xla_fsdp.sharding.layout import Layout, TensorSpec
from xla_fsdp.tpu.topology import resolve

bf16 = torch.bfloat16
POST = BackwardPrefetch.BACKWARD_POST


def world(size, replicas=1, slice=None):
    """Ranks of a TPU, without a device: sharding groups of ``size`` ranks, as many as replicas."""
    ordinals = range(size * replicas)
    groups = tuple(tuple(ordinals[n * size : (n + 1) * size]) for n in range(replicas))
    columns = tuple(zip(*groups, strict=True)) if replicas > 1 else ()
    routes = None
    if slice is not None:
        where = resolve(slice)
        routes = routes_for(where.chip.device_kind, attributes_of(where))
    return World(0, size, groups, torch.device("meta"), columns, routes=routes)


def block(size, width=1024, dtype=torch.float32, wide=()):
    shapes = {
        "norm1": (width,), "qkv": (3 * width, width), "qkv_bias": (3 * width,),
        "out": (width, width), "norm2": (width,), "up": (4 * width, width),
        "up_bias": (4 * width,), "down": (width, 4 * width), "empty": (0, 4),
    }  # fmt: skip
    return [
        TensorSpec(name, Layout.flat([torch.Size(shape)], size), dtype, name in wide)
        for name, shape in shapes.items()
    ]


def test_a_plan_for_4096_ranks_is_printed():
    specs, options = block(4096, 8192), FSDPOptions(compute_dtype=bf16)
    plan = plan_gathers(specs, options, world(4096), label="h.0.")
    # A vector is padded to 128 elements a rank: 1 MiB, too large to share a collective.
    parts = {"norm1": (1, 128), "qkv": (384, 128), "qkv_bias": (1, 128), "out": (128, 128)}
    # Rows that fill whole tiles travel as they are.
    parts |= {"norm2": (1, 128), "up": (8, 8192), "up_bias": (1, 128), "down": (512, 128)}
    assert list(map(str, plan)) == [
        f"all-gather h.0.{name}: bfloat16{list(shape)} a rank, 1 groups of 4096, "
        "after inputs 1 before, after gather"
        for name, shape in parts.items()
    ]
    # reshard_after_forward=8: the last parameters first, among 8 ranks that store 1/8 each.
    stored = plan_gathers(specs, options, world(4096), backward=True, stored_among=world(8, 512))
    assert str(stored[0]) == (
        "all-gather down: bfloat16[262144, 128] a rank, 512 groups of 8, "
        "after gradient 1 before, after reductions 2 before, after gather"
    )
    float32 = dict.fromkeys(range(8), torch.float32)
    plan = plan_reductions(specs, float32, world(4096), Divisors.of(world(4096), False))
    assert str(plan[1]) == (
        f"reduce-scatter qkv: float32{[384, 128]} a rank, 1 groups of 4096, scaled by 0.000244141"
    )
    hybrid = world(256, 16)
    plan = plan_reductions(block(256, 8192), {1: bf16}, hybrid, Divisors.of(hybrid, False))
    assert list(map(str, plan)) == [
        "reduce-scatter qkv: bfloat16[96, 8192] a rank, 16 groups of 256, summed over 16 "
        "replicas, divided by 4096 at the end"
    ]


def test_small_tensors_fill_as_many_collectives_as_they_need():
    specs = block(8, 64) * 400
    plan = plan_gathers(specs, FSDPOptions(), world(8))
    sent = [number for one in plan for number in one.tensors]
    assert sorted(sent) == [n for n, spec in enumerate(specs) if spec.layout.numel]
    assert 1 < len(plan) < 5


@pytest.mark.parametrize("prefetch,limit", list(itertools.product([True, False], repeat=2)))
def test_prefetch_is_a_statement_of_order(prefetch, limit):
    options = FSDPOptions(
        forward_prefetch=prefetch,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if prefetch else None,
        limit_all_gathers=limit,
    )
    specs, ranks, chain = block(8), world(8), Wait(Event.GATHER, 0)
    before = int(prefetch)
    reductions = [Wait(Event.REDUCTIONS, 2)] if limit else []
    if limit and not prefetch:
        reductions.append(Wait(Event.REDUCTIONS, 1))
    forward, backward = (
        plan_gathers(specs, options, ranks, backward=backward) for backward in (False, True)
    )
    assert {one.waits for one in forward} == {(Wait(Event.INPUTS, before), chain)}
    assert {one.waits for one in backward} == {(Wait(Event.GRADIENT, before), *reductions, chain)}
    other = FSDPOptions(forward_prefetch=not prefetch, backward_prefetch=POST)
    for one, two in zip(forward, plan_gathers(specs, other, ranks), strict=True):
        assert (one.tensors, one.shape, one.route) == (two.tensors, two.shape, two.route)


def test_small_tensors_of_16_bits_travel_with_wide_ones():
    specs = block(8, wide=("norm1", "norm2"))
    shared, *rest = plan_gathers(specs, FSDPOptions(compute_dtype=bf16), world(8))
    assert shared.dtype is torch.float32 and len(shared.tensors) == 4
    assert {one.dtype for one in rest} == {bf16}


@pytest.mark.parametrize(
    "size,replicas,divisors,scale,after",
    [
        (8, 1, None, 1 / 8, None),  # a power of two: the reduce-scatter makes the mean
        (6, 1, None, 1.0, 6.0),
        (4, 2, None, 1.0, 8.0),  # replicas are summed up before the division
        (8, 1, Divisors(2.0, 4.0), 1 / 4, None),
        (8, 1, Divisors(1.0, 3.0), 1.0, 3.0),
    ],
)
def test_reductions_divide_where_it_is_exact(size, replicas, divisors, scale, after):
    ranks, specs = world(size, replicas), block(size)
    divisors = divisors or Divisors.of(ranks, False)
    plan = plan_reductions(specs, {1: torch.float32, 3: bf16, 0: torch.float32}, ranks, divisors)
    assert sorted(number for one in plan for number in one.tensors) == [0, 1, 3]
    for one in plan:
        assert (one.scale, one.divide_after) == (scale, after)
        assert one.divide_before == divisors.before and one.replica_groups == ranks.replica_groups


def test_routes_are_those_of_the_slice():
    ranks, routes = world(256, slice="v5litepod-256"), Routes(resolve("v5litepod-256"))
    specs = block(256, 16384)
    for one in plan_gathers(specs, FSDPOptions(), ranks):
        assert one.route == routes.gather(one.bytes)
    reductions = plan_reductions(
        specs, dict.fromkeys(range(8), torch.float32), ranks, Divisors.of(ranks, False)
    )
    assert {one.name: one.route.overlaps for one in reductions} == {
        "small_parameters": False, "qkv_bias": False, "up_bias": False,
        "qkv": True, "out": True, "up": True, "down": True,
    }  # fmt: skip
    assert "16 rings of 16 then 16 rings of 16" in str(reductions[-1])


@on_each_rank(2)
def test_cpu_ranks_have_a_collective_a_tensor(rank):
    specs = [spec for spec in block(2, 256) if spec.key in ("norm1", "qkv", "norm2")]
    plan = plan_gathers(specs, FSDPOptions(), World.current())
    assert [(one.name, one.waits) for one in plan] == [("norm1", ()), ("qkv", ()), ("norm2", ())]
