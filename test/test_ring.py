"""Reduce-scatters around a ring: the way through the chips, and what arrives."""

import pytest
import torch

from xla_fsdp.planning.slices.topology import resolve
from xla_fsdp.ring import Ring, ring_of


def grid(columns, rows):
    return [(x, y) for y in range(rows) for x in range(columns)]


@pytest.mark.parametrize(
    "columns,rows", [(2, 2), (2, 4), (4, 2), (4, 4), (3, 2), (2, 3), (3, 4), (4, 3), (5, 2), (2, 8)]
)
def test_a_ring_uses_links_between_neighbours(columns, rows):
    places = grid(columns, rows)
    ring = ring_of(places)
    assert sorted(ring.ranks) == list(range(len(places)))
    for way in range(2):
        for source, target in ring.pairs(way):
            (a, b), (c, d) = places[source], places[target]
            assert abs(a - c) + abs(b - d) == 1
    assert {(b, a) for a, b in ring.pairs(0)} == set(ring.pairs(1))


def test_slices_of_v5e_have_one():
    for name in ("v5litepod-4", "v5litepod-8", "v5litepod-16", "v6e-8"):
        assert ring_of([place[:2] for place in resolve(name).coordinates()]) is not None


@pytest.mark.parametrize(
    "places",
    [
        grid(3, 3),  # no ring visits an odd number of chips by single links
        grid(8, 1),  # a line
        grid(8, 4),  # too long to be worth it
        [(0, 0), (1, 0), (0, 1)],  # a corner is missing
        [(0, 0), (2, 0), (0, 1), (2, 1)],  # not neighbours
        [(0, 0), (0, 0), (1, 0), (1, 0)],  # two ranks a chip
    ],
)
def test_where_there_is_none(places):
    assert ring_of(places) is None


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3), (0, 2, 3, 1), (4, 0, 2, 1, 3, 5)])
def test_every_part_comes_home_with_everybodys_values(ranks):
    ring = Ring(ranks)
    size = len(ranks)
    for way in range(2):
        added = {rank: ring.parts(rank)[way] for rank in ranks}
        held = {rank: [(rank, added[rank][0])] for rank in ranks}
        for step in range(1, size):
            held = {target: held[source] for source, target in ring.pairs(way)}
            held = {rank: [*held[rank], (rank, added[rank][step])] for rank in ranks}
        for rank in ranks:
            assert sorted(held[rank]) == [(other, 2 * rank + way) for other in range(size)]


def around(rank, dtype):
    """A reduce-scatter of both kinds, of the same values."""
    from dataclasses import replace

    from xla_fsdp.world import World

    world = World.current()
    torch.manual_seed(rank)
    full = torch.randint(-8, 8, (4 * 6, 5)).to(dtype).to(world.device)
    ring = replace(world, ring=Ring((0, 2, 3, 1)))
    return (
        world.reduce_scatter(full, "plain", 0.5).cpu(),
        ring.reduce_scatter_beside_compute(full, "ring", 0.5).cpu(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_ranks_get_the_same_as_from_a_reduce_scatter(run_ranks, dtype):
    for plain, ring in run_ranks(around, 4, dtype):
        torch.testing.assert_close(ring, plain, rtol=0, atol=0)
