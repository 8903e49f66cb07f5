"""The functions that give the full state_dict: fronts of ``stream``, with memory as the target."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .errors import MissingRankError, WorldSizeError
from .legacy.files import OUTPUT_NAME
from .legacy.ranks import rank_from_state_dict
from .legacy.source import LegacySource, open_legacy
from .stream.disk import Disk
from .stream.options import PTH, Options
from .stream.plan import make_plan
from .stream.run import put
from .stream.target import Target, check_target


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Mapping[str, Any]],
    shard_metadata: Mapping[str, Any],
    *,
    tied: Mapping[str, str] | None = None,
) -> OrderedDict[str, Any]:
    """Rebuild the full state_dict from those of all ranks.

    Args:
        state_dict_list: ``model.state_dict()`` of every rank, in order of rank.
        shard_metadata: ``model.get_shard_metadata()`` of any one rank.
        tied: {further name: parameter name} for tied weights whose further names the metadata does
            not record, as is the case for the in-tree class.

    Returns:
        The state_dict of the unsharded model. Tied names share one tensor.

    Raises:
        WorldSizeError: another number of state_dicts than ranks in the metadata.
        InvalidMetadataError, ShardMismatchError, TiedWeightError: see their descriptions.
    """
    if not state_dict_list:
        raise MissingRankError("state_dict_list: is empty")
    ranks = []
    for index, state_dict in enumerate(state_dict_list):
        rank = rank_from_state_dict(state_dict, shard_metadata, f"state_dict_list[{index}]")
        ranks.append(replace(rank, layout=replace(rank.layout, rank=index)))
    world_size = ranks[0].layout.world_size
    if len(ranks) != world_size:
        raise WorldSizeError(
            f"state_dict_list: has {len(ranks)} entries, shard_metadata says {world_size} ranks"
        )
    return LegacySource(ranks, "state_dict_list", tied).state_dict()


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = "*.pth",
    save_path: str = "",
    save_model: bool = True,
    *,
    tied: Mapping[str, str] | None = None,
) -> tuple[OrderedDict[str, Any], str | None]:
    """Rebuild the full state_dict from the rank files ``ckpt_prefix + ckpt_suffix``.

    Each file is ``{"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}``
    and may hold more. Results of earlier runs that match the pattern are ignored. Memory: the
    result; the rank files are mapped from disk.

    Args:
        ckpt_prefix: taken literally, whatever characters are in it.
        ckpt_suffix: a glob pattern.
        save_path: where to write ``{"model": full_state_dict, ...}``; by default
            ``ckpt_prefix + "_consolidated.pth"``.
        save_model: False to write nothing.
        tied: see `consolidate_sharded_state_dicts`.

    Returns:
        The full state_dict and the path written, None if ``save_model`` is False.

    Raises:
        CheckpointError: one of its subclasses, naming the file; nothing was written.
    """
    prefix = os.fspath(ckpt_prefix)
    source = open_legacy(prefix, ckpt_suffix, tied)
    if not save_model:
        return source.state_dict(), None
    target, disk = Target(os.fspath(save_path) or prefix + OUTPUT_NAME, False, PTH), Disk()
    # Before the work is done, not after.
    check_target(target.path, target.is_folder, source.inputs, disk)
    state_dict = source.state_dict()
    plan = make_plan(source, Options(PTH, tied=dict(tied or {})), target.name, state_dict)
    put(plan, target, source.inputs, disk)
    return state_dict, target.path
