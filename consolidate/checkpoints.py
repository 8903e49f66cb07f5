"""The public functions: from rank files or state_dicts to the full state_dict."""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import storage
from .assemble import assemble
from .errors import MissingRankError, WorldSizeError
from .native import FORMAT, VERSION
from .ranks import (
    Rank,
    check_consistent,
    complete_world,
    rank_from_checkpoint,
    rank_from_state_dict,
)

OUTPUT_NAME = "_consolidated.pth"


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Mapping[str, Any]],
    shard_metadata: Mapping[str, Any],
    *,
    tied: Mapping[str, str] | None = None,
) -> "OrderedDict[str, Any]":
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
    return _consolidate(ranks, tied)


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = "*.pth",
    save_path: str = "",
    save_model: bool = True,
    *,
    tied: Mapping[str, str] | None = None,
) -> "tuple[OrderedDict[str, Any], str | None]":
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
    default_path = prefix + OUTPUT_NAME
    path = os.fspath(save_path) or default_path
    ranks = read_ranks(storage.find_files(prefix, ckpt_suffix), default_path)
    if save_model:
        storage.check_output(path, [rank.label for rank in ranks])
    world = complete_world(ranks)
    state_dict = _consolidate(world, tied)
    if not save_model:
        return state_dict, None
    marker = {"format": FORMAT, "version": VERSION, "world_size": len(world)}
    storage.write_file(path, state_dict, marker)
    return state_dict, path


def read_ranks(
    paths: list[str], default_path: str, allow_unsafe_pickle: bool = False
) -> list[Rank]:
    """Open every file that is not the result of an earlier run."""
    ranks = []
    for path in paths:
        content = storage.read_file(path, allow_unsafe_pickle)
        if storage.is_consolidated(content) or _is_intree_output(content, path, default_path):
            continue
        ranks.append(rank_from_checkpoint(content, path))
    if not ranks:
        raise MissingRankError(f"{paths[0]}: is a consolidated model, and there are no rank files")
    return ranks


def _is_intree_output(content: Any, path: str, default_path: str) -> bool:
    """The in-tree class marks its result by nothing but its default name."""
    return path == default_path and isinstance(content, Mapping) and content.keys() == {"model"}


def _consolidate(world: list[Rank], tied: Mapping[str, str] | None) -> "OrderedDict[str, Any]":
    check_consistent(world)
    if tied:
        # Rank 0 alone decides under which names the result is listed.
        world = [replace(world[0], layout=world[0].layout.tie(tied)), *world[1:]]
    return assemble(world)
