"""Functions that return the full (unsharded) state_dict of per-rank files or state_dicts."""

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
from .stream.run import write_result
from .stream.target import Target, check_target
from .stream.write_plan import make_write_plan


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Mapping[str, Any]],
    shard_metadata: Mapping[str, Any],
    *,
    tied: Mapping[str, str] | None = None,
) -> OrderedDict[str, Any]:
    """Rebuild the full state_dict from the state_dicts of all ranks.

    Args:
        state_dict_list: ``model.state_dict()`` of every rank, in rank order.
        shard_metadata: ``model.get_shard_metadata()`` of any one rank.
        tied: ``{alias: parameter name}`` for tied weights whose other names the metadata does not
            record. torch_xla's own FSDP class does not record them.

    Returns:
        The state_dict of the unsharded model. All names of a tied weight share one tensor.

    Raises:
        MissingRankError: ``state_dict_list`` is empty.
        WorldSizeError: the number of state_dicts is not the number of ranks in the metadata.
        InvalidMetadataError: ``shard_metadata`` is incomplete or contradicts itself.
        ShardMismatchError: keys, shapes or dtypes do not match.
        TiedWeightError: a name in ``tied`` does not exist, or an alias is in use.
    """
    if not state_dict_list:
        raise MissingRankError("state_dict_list: is empty. Pass the state_dict of every rank.")
    ranks = []
    for index, state_dict in enumerate(state_dict_list):
        rank = rank_from_state_dict(state_dict, shard_metadata, f"state_dict_list[{index}]")
        ranks.append(replace(rank, layout=replace(rank.layout, rank=index)))
    world_size = ranks[0].layout.world_size
    if len(ranks) != world_size:
        raise WorldSizeError(
            f"state_dict_list: has {len(ranks)} entries, but shard_metadata is for {world_size} "
            "ranks. Pass the state_dict of every rank."
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
    and may have other keys. Results of earlier runs that match the pattern are ignored. Memory: the
    size of the result; the rank files are memory-mapped.

    Args:
        ckpt_prefix: path prefix of the files. It is not a pattern.
        ckpt_suffix: glob pattern of the rest of the path.
        save_path: path of the result, ``{"model": full_state_dict, ...}``. Default:
            ``ckpt_prefix + "_consolidated.pth"``.
        save_model: ``False`` writes no file.
        tied: see `consolidate_sharded_state_dicts`.

    Returns:
        The full state_dict, and the path of the result or None if ``save_model`` is False.

    Raises:
        CheckpointError: a subclass of it; the message names the file. Nothing is written.
    """
    prefix = os.fspath(ckpt_prefix)
    source = open_legacy(prefix, ckpt_suffix, tied)
    if not save_model:
        return source.state_dict(), None
    target, disk = Target(os.fspath(save_path) or prefix + OUTPUT_NAME, False, PTH), Disk()
    # Check the target before reading the tensors.
    check_target(target.path, target.is_folder, source.inputs, disk)
    state_dict = source.state_dict()
    plan = make_write_plan(source, Options(PTH, tied=dict(tied or {})), target.name, state_dict)
    write_result(plan, target, source.inputs, disk)
    return state_dict, target.path
