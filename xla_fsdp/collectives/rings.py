"""A reduce-scatter around a ring of neighbouring chips, made of permutes.

The TPU compiler runs a reduce-scatter while everything else waits. Permutes it starts, and goes on
to compute. So on chips that gain by it (``Chip.gains_by_rings``) large gradients go around a ring:
the part of rank r starts at its neighbour, and every chip on the way adds its own values, until it
comes to r after n-1 steps. As many bytes as a reduce-scatter sends. One half of every part goes one
way round and the other half the other way, so that both links of a chip are in use.

Example, three ranks, one way round, of part 0 = [a0 a1 a2] (what each rank has of it):
rank 1 sends a1 to rank 2, which sends a1+a2 to rank 0, which adds a0.

Nothing here imports torch or torch_xla; ``world.py`` traces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Around a row that wraps, where both links of a chip go to neighbours.
SHORTEST_ROW, LONGEST_ROW = 4, 16


@dataclass(frozen=True)
class Rings:
    """Groups of ranks that each go around a ring of their own, all at the same time.

    ``rings``: the ranks of each in order: each a neighbour of the next, the last of the first.
    """

    rings: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks in each ring."""
        return len(self.rings[0])

    def pairs(self, way: int) -> list[tuple[int, int]]:
        """Who sends to whom, for ``way`` 0 (onwards) or 1 (back)."""
        step = 1 if way == 0 else -1
        return [
            (rank, ring[(i + step) % len(ring)])
            for ring in self.rings
            for i, rank in enumerate(ring)
        ]

    def parts(self, rank: int) -> list[list[int]]:
        """For each way, the part that ``rank`` adds to what it holds at each step, its own last.

        Part ``p`` is for the ``p``-th rank of the group, in ascending order. Counted in halves: of
        every part the half ``2p`` goes onwards and ``2p + 1`` back.
        """
        ring = next(ring for ring in self.rings if rank in ring)
        part = {rank: number for number, rank in enumerate(sorted(ring))}
        at, size = ring.index(rank), len(ring)
        return [
            [2 * part[ring[(at - sign * (step + 1)) % size]] + way for step in range(size)]
            for way, sign in enumerate((1, -1))
        ]


def rings_of(
    groups: Sequence[Sequence[int]], places: Sequence[tuple[int, ...]], rows: Sequence[int]
) -> Rings | None:
    """A ring through the chips of each group, over links between neighbours only.

    ``places``: ``(x, y)`` of the chip of every rank, one rank each. ``rows``: chips along x and
    along y, where the last is a neighbour of the first; 0 where it is not. ``None`` if a group is
    no such whole row.
    """
    rings = []
    for group in groups:
        path = _row([places[rank] for rank in group], rows)
        if path is None:
            return None
        rings.append(tuple(group[number] for number in path))
    return Rings(tuple(rings))


def _row(places: Sequence[tuple[int, ...]], rows: Sequence[int]) -> list[int] | None:
    """Numbers of ``places`` along the axis whose whole length they are, if it wraps around."""
    for axis, length in enumerate(rows):
        along = {place[axis]: number for number, place in enumerate(places)}
        straight = len({place[1 - axis] for place in places}) == 1
        if straight and SHORTEST_ROW <= length == len(along) == len(places) <= LONGEST_ROW:
            return [along[at] for at in range(length)]
    return None
