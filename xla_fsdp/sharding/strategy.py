"""``sharding_strategy`` and ``device_mesh``: torch FSDP's names for what other options say."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla.runtime as xr

from ..ranks.slices import slices_of_ranks

Groups = Sequence[Sequence[int]]


class ShardingStrategy(enum.Enum):
    """What of a model is sharded over which ranks, and when; the names are torch FSDP's."""

    FULL_SHARD = enum.auto()  # parameters, gradients, optimizer state (ZeRO-3)
    SHARD_GRAD_OP = enum.auto()  # the same, and parameters stay from forward to backward (ZeRO-2)
    NO_SHARD = enum.auto()  # nothing: every rank has all, and gradients are averaged
    HYBRID_SHARD = enum.auto()  # FULL_SHARD in groups that average their gradients
    _HYBRID_SHARD_ZERO2 = enum.auto()  # SHARD_GRAD_OP in such groups


S = ShardingStrategy
_HYBRID = (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2)
# NO_SHARD leaves it to reshard_after_forward whether a second copy of the parameters is kept.
_RESHARDS = {
    S.FULL_SHARD: True,
    S.HYBRID_SHARD: True,
    S.SHARD_GRAD_OP: False,
    S._HYBRID_SHARD_ZERO2: False,
}


def checked_mesh(device_mesh: Any) -> list[int] | list[list[int]]:
    """The ordinals of ``device_mesh``, one- or two-dimensional.

    Args:
        device_mesh: a tensor or nested lists of ordinals, or what has such under ``.mesh``
            (``torch.distributed.device_mesh.DeviceMesh``).

    Raises:
        ValueError: it is something else, or does not name every rank once.
    """
    ranks = list(range(xr.world_size()))
    try:
        mesh = torch.as_tensor(getattr(device_mesh, "mesh", device_mesh))
        whole = not mesh.is_floating_point()
        fits = whole and mesh.dim() in (1, 2) and sorted(mesh.flatten().tolist()) == ranks
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(
            "device_mesh must be a 1-D mesh (the ranks that share the parameters) or a 2-D one "
            "(a row for each group that does, ranks with the same shard in one column) with each "
            f"of the {len(ranks)} ranks once, as a DeviceMesh, a tensor or lists of ordinals; got "
            f"{device_mesh!r}"
        )
    return mesh.tolist()


def mesh_of_slices(strategy: ShardingStrategy | None) -> list[list[int]] | None:
    """The 2-D mesh of a launch on several slices where the user names no ranks: a row for each
    slice. ``None`` on one slice, and with a strategy that has no replicas.

    Between slices is the data-centre network, a tenth and less of what the links within one carry:
    gathers stay within a slice, and a step sends one shard of gradients over it.

    Raises:
        ValueError: the slices are of different sizes.
    """
    if strategy is not None and strategy not in _HYBRID:
        return None
    slices = slices_of_ranks()
    if len({len(one) for one in slices}) > 1:
        raise ValueError(
            f"the ranks are on slices of {', '.join(str(len(one)) for one in slices)}: nothing can "
            "be sharded within each and replicated over them. Take slices of equal size, or pass "
            "sharding_strategy=ShardingStrategy.FULL_SHARD to shard over all ranks"
        )
    return [list(one) for one in slices] or None


def meant_by_strategy(
    strategy: ShardingStrategy | None,
    mesh: list[int] | list[list[int]] | None,
    sharding_groups: Groups | None,
    replication_groups: Groups | None,
) -> dict[str, Any]:
    """The options that ``sharding_strategy`` and ``device_mesh`` stand for, by name.

    ``sharding_groups`` and ``replication_groups`` are the options of these names.

    Raises:
        ValueError: the strategy does not go with the mesh or the groups.
    """
    rows = None if mesh is None else torch.tensor(mesh)
    hybrid = strategy in _HYBRID
    if rows is not None and strategy is not None and (rows.dim() == 2) != hybrid:
        raise ValueError(
            f"sharding_strategy={strategy} needs a {2 if hybrid else 1}-D device_mesh, got {mesh}: "
            "the HYBRID ones take (replicate, shard), the others one list of ranks"
        )
    if hybrid and mesh is None and not (sharding_groups and replication_groups):
        raise ValueError(
            f"sharding_strategy={strategy} needs to know the groups: pass device_mesh=[[0, 1], "
            "[2, 3]], whose rows share the parameters, or sharding_groups and replication_groups "
            "(where there are several slices, each is a group by itself); "
            f"got device_mesh=None, sharding_groups={sharding_groups} and "
            f"replication_groups={replication_groups}"
        )
    if strategy in (S.FULL_SHARD, S.SHARD_GRAD_OP) and replication_groups:
        raise ValueError(
            f"sharding_strategy={strategy} contradicts replication_groups={replication_groups}: "
            "one of the HYBRID strategies has replicas"
        )
    meant: dict[str, Any] = {}
    if strategy in _RESHARDS:
        meant["reshard_after_forward"] = _RESHARDS[strategy]
    if strategy is S.NO_SHARD:
        rows = torch.arange(xr.world_size())[:, None]
    if rows is not None:
        rows = rows if rows.dim() == 2 else rows[None]
        meant["sharding_groups"] = rows.tolist()
        meant["sharding_world_size"] = rows.shape[1]
        meant["sharding_rank"] = int((rows == xr.global_ordinal()).nonzero()[0, 1])
        if rows.shape[0] > 1:
            meant["replication_groups"] = rows.T.tolist()
    return meant
