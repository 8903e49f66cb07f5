"""Reduce-scatters around rings: the way through the chips, and what arrives."""

from dataclasses import replace

import pytest
import torch
from on_ranks import on_each_rank

from xla_fsdp.collectives.routes import Rings, Route, Routes, rings_of
from xla_fsdp.collectives.world import World
from xla_fsdp.tpu.topology import resolve


def grid(columns, rows):
    return [(x, y) for y in range(rows) for x in range(columns)]


def test_a_ring_uses_links_between_neighbours():
    places = grid(4, 8)
    column = tuple(range(1, 32, 4))
    rings = rings_of([column], places, (0, 8))
    assert sorted(rings.rings[0]) == list(column)
    for way in range(2):
        for source, target in rings.pairs(way):
            (a, b), (c, d) = places[source], places[target]
            assert a == c and (d - b) % 8 in (1, 7)
    assert {(b, a) for a, b in rings.pairs(0)} == set(rings.pairs(1))


def test_rows_that_wrap_around():
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


@pytest.mark.parametrize(
    "rings",
    [[(0, 1)], [(0, 1, 2, 3)], [(0, 2, 3, 1)], [(4, 0, 2, 1, 3, 5)], [(0, 4, 2, 6), (5, 1, 7, 3)]],
)
def test_every_part_comes_home_with_everybodys_values(rings):
    several = Rings(rings)
    ranks = sorted(rank for ring in rings for rank in ring)
    for way in range(2):
        added = {rank: several.parts(rank)[way] for rank in ranks}
        held = {rank: [(rank, added[rank][0])] for rank in ranks}
        for step in range(1, several.size):
            held = {target: held[source] for source, target in several.pairs(way)}
            held = {rank: [*held[rank], (rank, added[rank][step])] for rank in ranks}
        for ring in rings:
            for number, rank in enumerate(sorted(ring)):
                assert sorted(held[rank]) == [(other, 2 * number + way) for other in sorted(ring)]


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
