"""A second shard of gathered parameters, stored from a forward to its backward by fewer ranks.

``reshard_after_forward=2`` on four ranks: the forward gathers the shards w0 to w3 of all four. Each
rank stores one half of the result, and the backward gathers two halves from two ranks::

    rank 0  [w0]  gather of 4   [w0 w1 w2 w3]  store [w0 w1]   gather of 2   [w0 w1 w2 w3]
    rank 1  [w1]  ----------->  [w0 w1 w2 w3]  --->  [w2 w3]   ----------->  [w0 w1 w2 w3]
    rank 2  [w2]                [w0 w1 w2 w3]        [w0 w1]                 [w0 w1 w2 w3]
    rank 3  [w3]                [w0 w1 w2 w3]        [w2 w3]                 [w0 w1 w2 w3]

Gradients are still reduced over all four ranks. Wang et al., "ZeRO++: Extremely Efficient
Collective Communication for Giant Model Training", 2023 (arXiv 2306.10209), call this hierarchical
partitioning; torch's ``fully_shard`` has the same option.

A stored piece has the shape that is sent: it is part ``i`` of ``k`` of the result of one gather, in
the communication dtype. So a gather among ``k`` ranks restores exactly that result.
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
class SecondaryShards:
    """The second shards that one pass stores.

    Attributes:
        world: the smaller group.
        shard_stamps: stamps of the shards that were gathered.
        pieces: this rank's part of the result of each gather, by the number of the first tensor in
            that gather; empty before the forward and after the backward.

    Lifetime: the pass owns it, and empties it when its backward is over.
    """

    world: World
    shard_stamps: list[Stamp] = field(default_factory=list)
    pieces: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, number: int, gathered: torch.Tensor) -> torch.Tensor:
        """Stores this rank's part of ``gathered``, ``(rows, ...)``, as ``(rows / k, ...)``.

        Returns ``gathered`` with the condition that the part exists before it is used. Otherwise
        the compiler would delay the cut to the backward, and keep all of it in memory until then.
        """
        parts = gathered.view(self.world.size, -1, *gathered.shape[1:])
        # The rank is data, not a constant: all ranks must have the same program.
        piece = torch.index_select(parts, 0, self.world.rank_on_device)[0]
        if self.world.as_on_tpu:
            gathered, piece = after([gathered, piece], [piece])
        self.pieces[number] = piece
        return gathered


class SecondaryShardCache:
    """The second shards of one unit.

    Args:
        world: the ranks that share the unit's shards.
        size: the size of the smaller groups, a divisor of the world's size.

    Attributes:
        world: the smaller group.
    """

    def __init__(self, world: World, size: int):
        self.world = subgroup(world, size)
        self._known: list[weakref.ref[SecondaryShards]] = []

    def fresh(self, shards: Sequence[torch.Tensor]) -> SecondaryShards:
        """An empty :class:`SecondaryShards` for a forward that gathers ``shards``."""
        made = SecondaryShards(self.world, stamps(shards))
        self._known = [one for one in self._known if one() is not None]
        self._known.append(weakref.ref(made))
        return made

    def of(self, shards: Sequence[torch.Tensor]) -> SecondaryShards | None:
        """The :class:`SecondaryShards` of ``shards`` with their current values, for a forward that
        the backward recomputes; ``None`` if none exists any more."""
        now = stamps(shards)
        for known in reversed(self._known):
            found = known()
            if found is not None and found.pieces and found.shard_stamps == now:
                return found
        return None


def subgroup(world: World, size: int) -> World:
    """The world of this rank's group, if ``world`` is cut into groups of ``size`` consecutive
    ranks."""
    groups = tuple(
        group[first : first + size]
        for group in world.groups
        for first in range(0, len(group), size)
    )
    # Routes go over a full slice, so they do not apply to a part of it.
    return replace(
        world, rank=world.rank % size, size=size, groups=groups, replica_groups=(), routes=None
    )


def checked_reshard(value: bool | int, size: int) -> bool | int:
    """Checks ``reshard_after_forward`` among ``size`` ranks: True, False or a number in between.

    Raises:
        ValueError: it does not divide ``size``.
    """
    if isinstance(value, bool):
        return value
    allowed = [number for number in range(1, size + 1) if size % number == 0]
    if value not in allowed:
        raise ValueError(
            "reshard_after_forward as a number of ranks must divide the "
            f"{size} ranks that share the parameters, got {value}. Pass one of {allowed}, or True "
            "or False"
        )
    # A group of one stores the full parameters, a group of all stores what the shards are.
    return value if 1 < value < size else value == size > 1
