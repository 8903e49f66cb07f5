"""Maps the tensors of each rank to those of the unsharded model, by the metadata of its file.

Errors are raised before any value is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from ..errors import (
    DuplicateRankError,
    ForeignFileError,
    InvalidMetadataError,
    MetadataMismatchError,
    MissingMetadataError,
    MissingRankError,
    ShardMismatchError,
    TiedWeightError,
    WorldSizeError,
)
from ..format.strict import Fields

_FLAT, _DIM0 = "flat", "dim0"
_FORMAT, _VERSION = "xla_fsdp", 1
_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module")
_SHARD = "_fsdp_shard"
_FLAT_PARAMETER = "flat_param_"


@dataclass(frozen=True)
class LegacyMember:
    """One parameter of the model.

    ``names``: its own, then those tied to it. ``offset``: of its first element in the flat
    parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LegacyParameter:
    """One tensor that every rank stores a part of.

    With layout ``"flat"``, ranks store 1-D chunks of the concatenated members; with ``"dim0"``,
    rows of the only member. The rest is padding.
    """

    layout: str
    numel: int
    members: tuple[LegacyMember, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for member in self.members for name in member.names)


@dataclass
class Rank:
    """The state_dict of one rank. `parameters`, `buffers` and `aliases` cover its keys.

    Attributes:
        label: name of the rank in messages, usually the path of its file.
        buffers: for each replicated value, its name and the dtype to restore or None.
        aliases: other keys under which a shard is stored, mapped to the parameter's key.
        ignored: names in ``buffers`` that are parameters, which the optimizer may have.
        optimizer: the value under "optimizer" in the file, unchecked.
    """

    label: str
    state_dict: Mapping[str, Any]
    world_size: int
    rank: int
    parameters: dict[str, LegacyParameter] = field(default_factory=dict)
    buffers: dict[str, tuple[str, torch.dtype | None]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    optimizer: Any = None


def read_rank(content: Any, label: str) -> Rank:
    """Interprets the content of a rank file.

    Raises:
        ForeignFileError, MissingMetadataError: the content is not that of a rank file.
        InvalidMetadataError, WorldSizeError: the metadata is not valid.
        ShardMismatchError: the model does not have the shards that the metadata describes.
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
    state_dict, metadata = content["model"], content["shard_metadata"]
    if not isinstance(state_dict, Mapping) or not all(isinstance(k, str) for k in state_dict):
        raise ForeignFileError(f"{label}: 'model' is not a state_dict (a dict with str keys)")
    found = Fields(metadata, f"{label}: shard_metadata")
    rank = Rank(
        label,
        state_dict,
        found.integer("world_size", 1),
        found.integer("rank"),
        optimizer=content.get("optimizer"),
    )
    if "format" in found:
        _read_native(found, rank)
    else:
        read_intree(found, rank)
    _validate(rank)
    return rank


def _validate(rank: Rank) -> None:
    if not 0 <= rank.rank < rank.world_size:
        raise WorldSizeError(
            f"{rank.label}: rank {rank.rank} is outside a world of {rank.world_size} ranks, "
            f"expected 0 to {rank.world_size - 1}"
        )
    for key, parameter in rank.parameters.items():

        def fail(what: str, key: str = key) -> NoReturn:
            raise InvalidMetadataError(f"{rank.label}: parameter {key!r}: {what}")

        if parameter.layout not in (_FLAT, _DIM0):
            fail(f"layout is {parameter.layout!r}, expected {_FLAT!r} or {_DIM0!r}")
        end = 0
        for member in sorted(parameter.members, key=lambda m: (m.offset, m.numel)):
            if not all(member.names):
                fail("a member has no name")
            if member.offset != end:
                fail(f"{member.names[0]!r} begins at element {member.offset}, expected {end}")
            end += member.numel
        if end != parameter.numel or not parameter.members:
            fail(f"members have {end} elements, expected numel {parameter.numel}")
        if parameter.layout == _DIM0 and (
            len(parameter.members) != 1 or not parameter.members[0].shape
        ):
            fail("layout 'dim0' needs exactly one member with at least one dimension")
    names = [name for parameter in rank.parameters.values() for name in parameter.names]
    names += [name for name, _ in rank.buffers.values()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidMetadataError(f"{rank.label}: {twice[0]!r} is described more than once")


def _require_keys(keys: Iterable[str], rank: Rank) -> None:
    for key in keys:
        if key not in rank.state_dict:
            raise ShardMismatchError(f"{rank.label}: parameter {key!r} is described but not stored")
        if not isinstance(rank.state_dict[key], torch.Tensor):
            raise ShardMismatchError(f"{rank.label}: parameter {key!r} is not a tensor")


def _read_native(found: Fields, rank: Rank) -> None:
    """Translates the metadata that ``consolidate/README.md`` defines."""
    found.require_format(_FORMAT, _VERSION)
    parameters = rank.parameters
    for key, each in found.child("parameters").children().items():
        members = tuple(
            LegacyMember(member.names("names"), member.shape("shape"), member.integer("offset"))
            for member in each.objects("members")
        )
        parameters[key] = LegacyParameter(each.text("layout"), each.integer("numel"), members)
    _require_keys(parameters, rank)
    if "ignored" in found:
        rank.ignored = found.names("ignored", least=0)

    owner = {name: key for key, parameter in parameters.items() for name in parameter.names}
    dtypes = found.child("buffers")
    for key in rank.state_dict:
        if key in parameters:
            continue
        tied_to = owner.get(key) or _same_flat_parameter(key, parameters)
        if tied_to is not None:
            rank.aliases[key] = tied_to
            continue
        dtype = getattr(torch, dtypes.text(key), None) if key in dtypes else None
        if key in dtypes and not isinstance(dtype, torch.dtype):
            dtypes.fail(
                f"dtype of {key!r} is {dtypes.text(key)!r:.80}, expected a name like 'float32'"
            )
        rank.buffers[key] = key, dtype


def _same_flat_parameter(key: str, parameters: Mapping[str, LegacyParameter]) -> str | None:
    """Key of the flat parameter that is the same as `key`, because its module has two names.

    ``b.flat_param_0`` is ``a.flat_param_0`` if each of its members has a name in ``b.``.
    """
    path, _, last = key.rpartition(".")
    for other, parameter in parameters.items():
        if other.rpartition(".")[2] == last and all(
            any(name.startswith(f"{path}.") for name in member.names)
            for member in parameter.members
        ):
            return other
    return None


def read_intree(found: Fields, rank: Rank) -> None:
    """Translates the metadata that torch_xla's ``XlaFullyShardedDataParallel`` writes.

    ``buffer_info`` has the original dtypes of cast buffers. Its keys have one more wrapper prefix
    than those of the state_dict. It is empty if the module was on the CPU when wrapped. Tied
    weights are not recorded, unless the shared module is itself wrapped. A shard with several
    dimensions has rows.
    """
    flattened = found.child("flatten_info")
    infos = {
        _dotted(module, name): (module, info)
        for module, shards in found.child("shard_info").children().items()
        for name, info in shards.children().items()
    }
    _require_keys(infos, rank)
    for key, (module, info) in infos.items():
        own, shape = info.text("_orig_name"), info.shape("_orig_size")
        # A parameter of the model with this name has one more prefix.
        if own.startswith(f"{_WRAPPERS[0]}.{_FLAT_PARAMETER}"):
            members = _read_flattened(_dotted(module, own), flattened)
        else:
            members = (LegacyMember((_clean_name(_dotted(module, own)),), shape, 0),)
        layout = _DIM0 if rank.state_dict[key].dim() > 1 else _FLAT
        rank.parameters[key] = LegacyParameter(layout, math.prod(shape), members)

    # Old versions do not write this entry.
    cast = found.child("buffer_info") if "buffer_info" in found else Fields({}, "")
    described = {_clean_name(name): name for name in cast}
    for key in rank.state_dict:
        if key in rank.parameters:
            continue
        if any(part.startswith(_SHARD) for part in key.split(".")):
            raise ShardMismatchError(f"{rank.label}: shard {key!r} is stored but not described")
        name, dtype = _clean_name(key), None
        if name in described:
            about = cast.child(described[name])
            dtype = about.json("_orig_dtype")
            if not isinstance(dtype, torch.dtype):
                about.fail(f"_orig_dtype is {dtype!r:.80}, expected a dtype")
        rank.buffers[key] = name, dtype


def _read_flattened(name: str, flattened: Fields) -> tuple[LegacyMember, ...]:
    value = flattened.list(name)
    if len(value) != 3 or any(not isinstance(column, (list, tuple)) for column in value):
        flattened.fail(f"{name!r:.80} is not a tuple (names, shapes, numels) of lists")
    if not len(value[0]) == len(value[1]) == len(value[2]):
        flattened.fail(
            f"{name!r:.80} has {len(value[0])} names, {len(value[1])} shapes and {len(value[2])} "
            "numels, expected equal counts"
        )
    owner = name.rpartition(".")[0]
    members, offset = [], 0
    for row in zip(*value, strict=True):
        each = Fields(dict(zip(("name", "shape", "numel"), row, strict=True)), flattened.label)
        full = _clean_name(_dotted(owner, each.text("name")))
        member = LegacyMember((full,), each.shape("shape"), offset)
        if member.numel != each.integer("numel"):
            each.fail(
                f"{full!r} of shape {member.shape} has {member.numel} elements, but its numel is "
                f"{each.integer('numel')}"
            )
        members.append(member)
        offset += member.numel
    return tuple(members)


def _clean_name(name: str) -> str:
    """Removes the parts of a dotted name that wrappers add.

    >>> _clean_name("_fsdp_wrapped_module.block._fpw_module.0.weight")
    'block.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def tie(rank: Rank, tied: Mapping[str, str]) -> None:
    original = dict(rank.parameters)
    taken = {name for parameter in original.values() for name in parameter.names}
    taken |= {name for name, _ in rank.buffers.values()}
    for alias, name in tied.items():
        if alias in taken:
            raise TiedWeightError(
                f"cannot tie {alias!r} to {name!r}: {alias!r} is in the checkpoint already. "
                "Use another alias."
            )
        owner = next((key for key, each in original.items() if name in each.names), None)
        if owner is None:
            raise TiedWeightError(
                f"cannot tie {alias!r} to {name!r}: there is no such parameter {name!r}"
            )
        members = tuple(
            replace(m, names=(*m.names, alias)) if name in m.names else m
            for m in rank.parameters[owner].members
        )
        rank.parameters[owner] = replace(rank.parameters[owner], members=members)
        taken.add(alias)


def sort_ranks(ranks: list[Rank]) -> list[Rank]:
    """Returns `ranks` in rank order. Raises CheckpointError if they are not one model's."""
    first, by_rank = ranks[0], dict[int, Rank]()
    for rank in ranks:
        if rank.world_size != first.world_size:
            raise WorldSizeError(
                f"{rank.label}: written by {rank.world_size} ranks,"
                f" but {first.label} by {first.world_size}. Use the files of one save."
            )
        other = by_rank.setdefault(rank.rank, rank)
        if other is not rank:
            raise DuplicateRankError(
                f"{rank.label}: is rank {rank.rank}, and so is {other.label}. Remove one of them."
            )
    missing = sorted(set(range(first.world_size)) - by_rank.keys())
    if missing:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise MissingRankError(
            f"{first.label}: written by {first.world_size} ranks,"
            f" but there is no file of rank {some}. Copy the files of all ranks."
        )
    ranks = [by_rank[number] for number in range(first.world_size)]
    for rank in ranks[1:]:
        _require_same(ranks[0], rank)
    _require_fit(ranks[0])
    return ranks


def _require_same(first: Rank, rank: Rank) -> None:
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
    for name in ("parameters", "buffers", "aliases"):
        mine, theirs = getattr(rank, name), getattr(first, name)
        for key in mine.keys() | theirs.keys():
            if mine.get(key) != theirs.get(key):
                raise MetadataMismatchError(
                    f"{rank.label}: describes {key!r} differently from {first.label}"
                )


def _signature(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _require_fit(rank: Rank) -> None:
    """Checks that shards have the right shapes and together cover the parameters."""
    for key, parameter in rank.parameters.items():
        shard = rank.state_dict[key]
        flat = parameter.layout == _FLAT
        needed, *tail = (parameter.numel,) if flat else parameter.members[0].shape
        if shard.dim() == 0 or list(shard.shape[1:]) != tail:
            raise ShardMismatchError(
                f"{rank.label}: shard {key!r} has shape {list(shard.shape)}, expected "
                f"{['n', *tail]}"
            )
        if shard.shape[0] * rank.world_size < needed:
            raise ShardMismatchError(
                f"{rank.label}: shard {key!r} has size {shard.shape[0]} in dimension 0, expected at"
                f" least {-(-needed // rank.world_size)}"
            )
    for alias, key in rank.aliases.items():
        if _signature(rank.state_dict[alias]) != _signature(rank.state_dict[key]):
            raise ShardMismatchError(f"{rank.label}: {alias!r} is tied to {key!r} but differs")
