"""Groups of ranks, as users state them: read and checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch_xla.runtime as xr

from ..tpu.slices import Groups


def lists(groups: Groups) -> list[list[int]]:
    """``groups`` as torch_xla wants them."""
    return [list(group) for group in groups]


def require_group_arguments(rank: int | None, size: int | None) -> tuple[int, int]:
    """The place and the size that go with ``sharding_groups``; raises ValueError without them."""
    if rank is None or size is None:
        raise ValueError(
            "sharding_groups needs sharding_rank and sharding_world_size as well, "
            f"got sharding_rank={rank} and sharding_world_size={size}. "
            "Pass all three, or device_mesh"
        )
    if not 0 <= rank < size:
        raise ValueError(
            f"sharding_rank must be in 0..{size - 1}, got {rank}. "
            "Pass this rank's place in its group"
        )
    return rank, size


def require_place(groups: Groups, rank: int, total: int) -> None:
    """Raises ValueError unless this rank is at place ``rank`` of one of ``groups``."""
    # A process that only pretends to be one of many ranks may take any place.
    ordinal = xr.global_ordinal()
    if total > 1 and all(group[rank] != ordinal for group in groups):
        raise ValueError(
            f"sharding_rank={rank}, but no group of sharding_groups has rank {ordinal}, which is "
            f"this one, at that place: {lists(groups)}. Pass this rank's place in its group"
        )


def checked_groups(name: str, groups: Sequence[Sequence[int]], size: int | None) -> Groups:
    """``groups``, the argument called ``name``, of ``size`` ordinals each (``None``: of as many as
    the first).

    Raises:
        ValueError: they are of other sizes, or an ordinal is in two.
    """
    checked = tuple(tuple(int(ordinal) for ordinal in group) for group in groups)
    size = len(checked[0]) if size is None and checked else size
    flat = [ordinal for group in checked for ordinal in group]
    if not checked or any(len(group) != size for group in checked):
        raise ValueError(
            f"every group of {name} must have {size} ordinals, got {lists(checked)}. "
            "Pass groups of equal size (sharding_groups: sharding_world_size)"
        )
    if len(set(flat)) != len(flat):
        raise ValueError(
            f"{name} names an ordinal twice: {lists(checked)}. Each rank must be in one group"
        )
    return checked


def require_replicas(replicas: Groups, groups: Groups) -> None:
    """Raises ValueError unless each of ``replicas`` are ranks that hold the same shard, one in each
    of some of ``groups``, and each rank of ``groups`` is in one."""
    place = {ordinal: number for group in groups for number, ordinal in enumerate(group)}
    flat = sorted(ordinal for group in replicas for ordinal in group)
    fit = all(len({place.get(ordinal) for ordinal in group}) == 1 for group in replicas)
    if flat != sorted(place) or not fit:
        raise ValueError(
            f"replication_groups={lists(replicas)} must name each rank of sharding_groups="
            f"{lists(groups)} once, and together those at the same place of their groups: "
            "sharding_groups=[[0, 1], [2, 3]] go with replication_groups=[[0, 2], [1, 3]]"
        )
