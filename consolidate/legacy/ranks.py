"""Checks that the contents of rank files are a complete and consistent set, and sorts them by rank.

The checks use keys, shapes, dtypes and metadata only. So an error is raised before any tensor value
is read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import (
    DuplicateRankError,
    ForeignFileError,
    MetadataMismatchError,
    MissingMetadataError,
    MissingRankError,
    ShardMismatchError,
    WorldSizeError,
)
from ..format.fields import Fields
from .layout import FLAT, LegacyParameter, RankLayout, read_intree, read_native


@dataclass(frozen=True)
class Rank:
    """The state_dict of one rank.

    Attributes:
        label: name of the rank in messages, usually the path of its file.
        optimizer: the value under "optimizer" in the file, unchecked.
    """

    label: str
    state_dict: Mapping[str, Any]
    layout: RankLayout
    optimizer: Any = None


def rank_from_checkpoint(content: Any, label: str) -> Rank:
    """Interpret the content of a rank file.

    Raises:
        ForeignFileError, MissingMetadataError: the content is not that of a rank file.
        InvalidMetadataError, WorldSizeError, ShardMismatchError: see `rank_from_state_dict`.
    """
    if not isinstance(content, Mapping) or not {"model", "shard_metadata"} & content.keys():
        raise ForeignFileError(
            f"{label}: not a rank file: it has neither 'model' nor 'shard_metadata'."
            " Move it away, or use a suffix that does not match it."
        )
    if "shard_metadata" not in content:
        raise MissingMetadataError(
            f"{label}: has no 'shard_metadata'. Save model.get_shard_metadata() under this key, in "
            "the same dict as 'model'."
        )
    if "model" not in content:
        raise ForeignFileError(
            f"{label}: has 'shard_metadata' but no 'model'. Save model.state_dict() under this key."
        )
    rank = rank_from_state_dict(content["model"], content["shard_metadata"], label)
    return replace(rank, optimizer=content.get("optimizer"))


def rank_from_state_dict(state_dict: Any, metadata: Any, label: str) -> Rank:
    """Interpret the state_dict of one rank by its metadata, in either format.

    Raises:
        InvalidMetadataError: the metadata is incomplete, contradicts itself or has an unknown
            version.
        WorldSizeError: the rank is not less than the world size.
        ShardMismatchError: `state_dict` does not have the shards that the metadata describes.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(k, str) for k in state_dict):
        raise ForeignFileError(f"{label}: 'model' is not a state_dict (a dict with str keys)")
    found = Fields(metadata, f"{label}: shard_metadata")
    read = read_native if "format" in found else read_intree
    return Rank(label, state_dict, read(found, state_dict, label))


def complete_world(ranks: Iterable[Rank]) -> list[Rank]:
    """Return `ranks` in rank order.

    Raises:
        WorldSizeError, DuplicateRankError, MissingRankError: `ranks` are not all ranks of one run.
    """
    ranks = list(ranks)
    if not ranks:
        raise MissingRankError("no ranks to consolidate")
    first = ranks[0]
    by_rank: dict[int, Rank] = {}
    for rank in ranks:
        if rank.layout.world_size != first.layout.world_size:
            raise WorldSizeError(
                f"{rank.label}: written by {rank.layout.world_size} ranks,"
                f" but {first.label} by {first.layout.world_size}. Use the files of one save."
            )
        other = by_rank.setdefault(rank.layout.rank, rank)
        if other is not rank:
            raise DuplicateRankError(
                f"{rank.label}: is rank {rank.layout.rank}, and so is {other.label}. Remove one of "
                "them."
            )
    missing = sorted(set(range(first.layout.world_size)) - by_rank.keys())
    if missing:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise MissingRankError(
            f"{first.label}: written by {first.layout.world_size} ranks,"
            f" but there is no file of rank {some}. Copy the files of all ranks."
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def check_consistent(ranks: list[Rank]) -> None:
    """Check that all ranks have the same model, and that the shards cover its parameters.

    Raises:
        ShardMismatchError: keys, shapes or dtypes differ between ranks or from the metadata.
        MetadataMismatchError: the ranks' metadata differs in more than the rank.
    """
    first = ranks[0]
    for rank in ranks[1:]:
        _check_same_tensors(first, rank)
        for name in ("parameters", "buffers", "aliases"):
            mine, theirs = getattr(rank.layout, name), getattr(first.layout, name)
            for key in mine.keys() | theirs.keys():
                if mine.get(key) != theirs.get(key):
                    raise MetadataMismatchError(
                        f"{rank.label}: describes {key!r} differently from {first.label}"
                    )
    for key, parameter in first.layout.parameters.items():
        _check_shard(key, parameter, first)
    for alias, key in first.layout.aliases.items():
        if _signature(first.state_dict[alias]) != _signature(first.state_dict[key]):
            raise ShardMismatchError(f"{first.label}: {alias!r} is tied to {key!r} but differs")


def _check_same_tensors(first: Rank, rank: Rank) -> None:
    differing = sorted(first.state_dict.keys() ^ rank.state_dict.keys())
    if differing:
        has, lacks = (rank, first) if differing[0] in rank.state_dict else (first, rank)
        raise ShardMismatchError(
            f"{lacks.label}: does not have {differing[0]!r}, but {has.label} does"
        )
    for key, value in rank.state_dict.items():
        found, expected = _signature(value), _signature(first.state_dict[key])
        if found != expected:
            raise ShardMismatchError(
                f"{rank.label}: {key!r} is {found}, but {expected} in {first.label}"
            )


def _signature(value: Any) -> str:
    """Dtype and shape of a tensor, or the type of another value (extra state of a module)."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _check_shard(key: str, parameter: LegacyParameter, rank: Rank) -> None:
    """Check the shape of one shard, and that the shards of all ranks cover the parameter."""
    shard, world_size = rank.state_dict[key], rank.layout.world_size
    shape = (parameter.numel,) if parameter.layout == FLAT else parameter.members[0].shape
    needed, tail = shape[0], shape[1:]
    if shard.dim() == 0 or tuple(shard.shape[1:]) != tail:
        raise ShardMismatchError(
            f"{rank.label}: shard {key!r} has shape {list(shard.shape)}, expected {['n', *tail]}"
        )
    if shard.shape[0] * world_size < needed:
        raise ShardMismatchError(
            f"{rank.label}: shard {key!r} has size {shard.shape[0]} in dimension 0, expected at"
            f" least {-(-needed // world_size)}"
        )
