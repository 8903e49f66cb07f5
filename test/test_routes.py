"""Collectives in stages and around rings: exact, and only where the link model is faster."""

from dataclasses import replace

import pytest
import torch
from on_ranks import on_each_rank, raises
from planned import described

from xla_fsdp.collectives.routes import (
    Rings,
    Route,
    Routes,
    attributes_of,
    require_collective_routes,
    rings_of,
    routes_for,
)
from xla_fsdp.collectives.world import World
from xla_fsdp.tpu.topology import resolve, slice_names

MB = 10**6


def members(groups):
    return {rank: group for group in groups for rank in group}


def scattered(route, size):
    """The parts that each rank holds the sum of after a reduce-scatter, and from how many ranks."""
    held = [(range(size), frozenset({rank})) for rank in range(size)]
    for groups in route.stages:
        group_of = members(groups)
        before = list(held)
        for rank in range(size):
            group = group_of[rank]
            parts = before[rank][0]
            assert all(before[other][0] == parts for other in group)
            share = len(parts) // len(group)
            at = group.index(rank) * share
            held[rank] = parts[at : at + share], frozenset().union(*(before[o][1] for o in group))
    before = list(held)
    for source, target in route.moves:
        held[target] = before[source]
    return held


def gathered(route, size):
    held = [(rank,) for rank in range(size)]
    for source, target in route.moves:
        held[source] = (target,)
    for groups in reversed(route.stages):
        group_of, before = members(groups), list(held)
        held = [sum((before[other] for other in group_of[rank]), ()) for rank in range(size)]
    return held


SMALL = [name for name in slice_names() if resolve(name).devices <= 128]


@pytest.mark.parametrize("name", SMALL)
def test_every_way_leaves_part_r_at_rank_r(name):
    slice = resolve(name)
    size = slice.devices
    ways = Routes(slice).all("all-gather", MB)
    assert len({way.stages for way in ways}) == len(ways)
    for way in ways:
        parts = [range(r, r + 1) for r in range(size)]
        assert scattered(way, size) == [(part, frozenset(range(size))) for part in parts]
        assert gathered(way, size) == [tuple(range(size))] * size


def collectives(rank, name):
    """Rows as one stage and as every other way deals them out; and the routes taken."""
    import torch_xla

    from xla_fsdp.collectives.world import World

    world = World.current()
    assert world.routes is None  # the CPU is no slice
    # Whole numbers, so that sums are exact in any order; each rank's and row's its own.
    full = torch.arange(8 * 3 * 2).view(24, 2).float() * (rank + 1) + rank
    shard = (torch.arange(6.0) + 100 * rank).view(3, 2)
    full, shard = full.to(world.device), shard.to(world.device)
    results = []
    for way in Routes(resolve(name)).all("all-gather", 1):
        results.append(world.reduce_scatter(full, scale=0.5, route=way))
        results.append(world.all_gather(shard, route=way))
    torch_xla.sync()
    return [result.cpu() for result in results]


@pytest.mark.parametrize("name", ["v3-8", "v5e:2x4", "v4-16"])
def test_stages_deal_out_the_same_rows_as_one_collective(run_ranks, name):
    everything = torch.cat([(torch.arange(6.0) + 100 * rank).view(3, 2) for rank in range(8)])
    total = sum(torch.arange(48).view(24, 2).float() * (r + 1) + r for r in range(8)) * 0.5
    ways = Routes(resolve(name)).all("all-gather", 1)
    assert any(way.moves for way in ways) == (name != "v4-16" and name != "v3-8")
    for rank, results in enumerate(run_ranks(collectives, 8, name)):
        assert len(results) == 2 * len(ways) > 4
        for shard, full in zip(results[::2], results[1::2], strict=True):
            assert torch.equal(shard, total[3 * rank : 3 * rank + 3])
            assert torch.equal(full, everything)


def widths(route):
    return tuple(len(groups[0]) for groups in route.stages), bool(route.moves)


@pytest.mark.parametrize(
    ("name", "size", "scatter", "gather"),
    [
        ("v3-8", 8, ((8,), False), ((8,), False)),
        ("tpu7x-128", 8, ((128,), False), ((128,), False)),
        # Lines: blocks as rings. A gather is one ring by itself, a small one on v3 is not.
        ("v5litepod-64", 8, ((16, 4), True), ((64,), False)),
        ("v5litepod-64", 24, ((32, 2), True), ((64,), False)),
        ("v3-128", 8, ((32, 4), True), ((32, 4), True)),
        ("v3-128", 24, ((64, 2), True), ((128,), False)),
        # What saves less than 60 us stays at once where the compiler overlaps collectives.
        ("v5litepod-16", 8, ((16,), False), ((16,), False)),
        ("v5litepod-16", 24, ((8, 2), True), ((16,), False)),
        ("v6e-64", 8, ((64,), False), ((64,), False)),
        ("v5litepod-256", 24, ((256,), False), ((256,), False)),
    ],
)
def test_choices_on_named_slices(name, size, scatter, gather):
    routes = Routes(resolve(name))
    assert widths(routes.scatter(size * MB)) == scatter
    assert widths(routes.gather(size * MB)) == gather


@pytest.mark.parametrize(
    "name", ["v3-128", "v4-128", "v5litepod-8", "v5p-128", "v6e-64", "tpu7x-128"]
)
def test_a_runtime_that_describes_a_slice_is_believed(name):
    slice = resolve(name)
    devices = attributes_of(slice)
    found = routes_for(slice.chip.device_kind, devices[::-1])
    assert (found.slice.chip, found.slice.shape) == (slice.chip, slice.shape)
    again = routes_for(slice.chip.device_kind, devices)
    assert again.slice == found.slice and again is routes_for(slice.chip.device_kind, devices)


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v9", "cpu"])
def test_what_is_no_slice_has_no_routes(kind):
    # A CPU; chips without places; not a full grid; another numbering; more chips than there are.
    devices = attributes_of(resolve("v3-32"))
    swapped = [dict(one) for one in devices]
    swapped[0]["coords"], swapped[9]["coords"] = swapped[9]["coords"], swapped[0]["coords"]
    far = [{**one, "coords": [64 * c for c in one["coords"]]} for one in devices]
    for given in ([{"name": "CPU:0"}], [{"name": "TPU:0"}], [], devices[:-1], swapped, far):
        assert routes_for(kind, given) is None
    assert (routes_for(kind, devices) is None) == (kind != "TPU v3")


def test_ranks_of_a_planned_slice_share_a_program(elsewhere):
    first, last = (elsewhere(program_on, rank, "v5litepod-64") for rank in (0, 63))
    for one, other in zip(first, last, strict=True):
        assert one == other
    assert last != elsewhere(program_on, 0, None)


def program_on(rank, name):
    from torch import nn

    import xla_fsdp
    from xla_fsdp.planning.tracing.step import trace_step

    def step():
        model = xla_fsdp.XlaFullyShardedDataParallel(nn.Linear(2048, 2048))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, 2048).to("xla")).sum().backward()
        optimizer.step()

    program = trace_step(step, rank, 64, name and resolve(name)).program
    return *described(program), program.fingerprint


def test_a_caller_may_have_them_as_the_compiler_does():
    slice_ = resolve("v5e:8x8")
    described = slice_.chip.device_kind, attributes_of(slice_)
    assert routes_for(*described, "default") is None
    for how in ((), ("auto",)):
        assert routes_for(*described, *how).scatter(8 * MB) == Routes(slice_).scatter(8 * MB)


@pytest.mark.parametrize(
    "how, said",
    [
        ("modelled", "modelled' was removed; allowed are 'auto' or 'default'. Pass 'auto'"),
        ("at_once", "at_once' was removed; allowed are 'auto' or 'default'. Pass 'default'"),
        ("fast", "must be 'auto' or 'default', got 'fast'"),
    ],
)
def test_other_ways_raise_with_what_to_pass(how, said):
    raises(ValueError, f"collective_routes.*{said}", require_collective_routes, how)


def grid(columns, rows):
    return [(x, y) for y in range(rows) for x in range(columns)]


def test_a_ring_uses_links_between_neighbours_or_wraps_around():
    places = grid(4, 8)
    column = tuple(range(1, 32, 4))
    rings = rings_of([column], places, (0, 8))
    assert sorted(rings.rings[0]) == list(column)
    for way in range(2):
        for source, target in rings.pairs(way):
            (a, b), (c, d) = places[source], places[target]
            assert a == c and (d - b) % 8 in (1, 7)
    assert {(b, a) for a, b in rings.pairs(0)} == set(rings.pairs(1))

    places = grid(16, 16)
    row, column = tuple(range(32, 48)), tuple(range(3, 256, 16))
    assert rings_of([row], places, (16, 16)).rings == (row,)
    assert rings_of([column], places, (0, 16)).rings == (column,)
    for rows in ((0, 0), (0, 16), (32, 16)):  # open, and half of a longer one
        assert rings_of([row], places, rows) is None
    assert rings_of([row[:8]], places, (16, 16)) is None


def test_large_gradients_go_around_rows_that_wrap_on_v5e():
    size, row_bytes = 20480 * 5120 * 2, 5120 * 2
    ways = Routes(resolve("v5litepod-256"))
    along, across = ways.scatter(size, row_bytes).stages
    assert ways.rings(along, size).size == 16 == len(across[0])
    for less in (size * 3 // 4, 8 << 20):
        assert not any(ways.rings(g, less) for g in ways.scatter(less, row_bytes).stages)
    # Nowhere else: open rows, and slices on which it was not measured.
    for name in ("v5litepod-128", "v5litepod-64", "v5litepod-8", "v6e-8", "v6e-256", "v4-128"):
        ways = Routes(resolve(name))
        assert not any(ways.rings(g, size) for g in ways.scatter(size, row_bytes).stages)


class Ways(Routes):
    def __init__(self, stages, rings):
        self.route, self.first = Route(stages), rings

    def scatter(self, number_of_bytes, row_bytes):
        return self.route

    def rings(self, groups, number_of_bytes):
        return self.first if groups == self.route.stages[0] else None


ALONE = (((0, 1, 2, 3),),), Rings(((0, 2, 3, 1),))
BLOCKS = (((0, 1), (2, 3)), ((0, 2), (1, 3))), Rings(((0, 1), (3, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stages,rings", [ALONE, BLOCKS], ids=["alone", "blocks"])
@on_each_rank(4)
def test_real_ranks_get_the_same_as_from_a_reduce_scatter(rank, dtype, stages, rings):
    world = World.current()
    torch.manual_seed(rank)
    full = torch.randint(-8, 8, (4 * 6, 5)).to(dtype).to(world.device)
    plain = replace(world, routes=Ways(stages, None))
    ring = replace(world, routes=Ways(stages, rings))
    for values in (full, full[:4]):  # with a row for each way, and with one too few
        found = ring.reduce_scatter(values, "ring", 0.5).cpu()
        expected = plain.reduce_scatter(values, "plain", 0.5).cpu()
        assert expected.numel()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
