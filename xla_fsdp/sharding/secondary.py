"""A second shard of what was gathered, kept from a forward to its backward within fewer ranks.

``reshard_after_forward=2`` on four ranks: the forward gathers the shards w0 to w3 of all four. Of
the whole, each rank keeps a half, and the backward gathers two halves from two ranks::

    rank 0  [w0]  gather of 4   [w0 w1 w2 w3]  keep  [w0 w1]   gather of 2   [w0 w1 w2 w3]
    rank 1  [w1]  ----------->  [w0 w1 w2 w3]  --->  [w2 w3]   ----------->  [w0 w1 w2 w3]
    rank 2  [w2]                [w0 w1 w2 w3]        [w0 w1]                 [w0 w1 w2 w3]
    rank 3  [w3]                [w0 w1 w2 w3]        [w2 w3]                 [w0 w1 w2 w3]

Gradients are reduced over all four as ever. Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023 (arXiv 2306.10209), call it hierarchical partitioning;
the option is that of torch's ``fully_shard``.

What is kept is cut as it travels: part ``i`` of ``k`` of what came out of one gather, in the dtype
of the wire. So a gather among ``k`` ranks brings just that again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..collectives.order import after
from ..collectives.world import World
from .freeing import Stamp, stamps


@dataclass(eq=False)
class Secondary:
    """What one pass keeps.

    Attributes:
        world: the smaller group.
        shard_stamps: of the shards that it was gathered from.
        pieces: this rank's part of the result of each gather, by the number of the first tensor
            that travelled in it; empty before the forward and after the backward.

    Lifetime: the pass owns it, and empties it when its backward is over.
    """

    world: World
    shard_stamps: list[Stamp] = field(default_factory=list)
    pieces: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, number: int, gathered: torch.Tensor) -> torch.Tensor:
        """Keeps this rank's part of ``gathered``, ``(rows, ...)``, as ``(rows / k, ...)``.

        Returns ``gathered`` as it is to be used: not before the part exists. Left alone, the
        compiler puts the cutting off to the backward, and the whole stays in memory until then.
        """
        parts = gathered.view(self.world.size, -1, *gathered.shape[1:])
        # Data, not a number in the program: all ranks must have the same.
        piece = torch.index_select(parts, 0, self.world.rank_on_device)[0]
        if self.world.as_on_tpu:
            gathered, piece = after([gathered, piece], [piece])
        self.pieces[number] = piece
        return gathered


class Secondaries:
    """Those of one unit.

    Args:
        world: the ranks that share the unit's shards.
        size: of the smaller groups, a divisor of the world's.

    Attributes:
        world: the smaller group.
    """

    def __init__(self, world: World, size: int):
        self.world = within(world, size)
        self._known: list[weakref.ref[Secondary]] = []

    def fresh(self, shards: Sequence[torch.Tensor]) -> Secondary:
        """An empty one, for a forward that gathers ``shards``."""
        made = Secondary(self.world, stamps(shards))
        self._known = [one for one in self._known if one() is not None]
        self._known.append(weakref.ref(made))
        return made

    def of(self, shards: Sequence[torch.Tensor]) -> Secondary | None:
        """One that was made of ``shards`` as they are now, for a forward that a backward runs
        again; ``None`` if there is none any more."""
        now = stamps(shards)
        for known in reversed(self._known):
            found = known()
            if found is not None and found.pieces and found.shard_stamps == now:
                return found
        return None


def within(world: World, size: int) -> World:
    """The world of each ``size`` consecutive ranks of ``world``."""
    groups = tuple(
        group[first : first + size]
        for group in world.groups
        for first in range(0, len(group), size)
    )
    # Routes are ways over a whole slice.
    return replace(
        world, rank=world.rank % size, size=size, groups=groups, replica_groups=(), routes=None
    )


def checked_reshard(value: bool | int, size: int) -> bool | int:
    """``reshard_after_forward`` among ``size`` ranks: True, False or a number in between.

    Raises:
        ValueError: it does not divide ``size``.
    """
    if isinstance(value, bool):
        return value
    allowed = [number for number in range(1, size + 1) if size % number == 0]
    if value not in allowed:
        raise ValueError(
            "reshard_after_forward as a number of ranks must divide the "
            f"{size} that share the parameters: one of {allowed}, or True or False; got {value}"
        )
    # A group of one keeps all, a group of all keeps what they have anyway.
    return value if 1 < value < size else value == size > 1
