"""Maps the tensors of one rank to those of the unsharded model, by the metadata of its file.

There are two metadata formats: this package's (:func:`read_native`) and that of torch_xla's own
class (:func:`read_intree`). Both are translated into a `RankLayout`, so other modules need not
distinguish them.

Example: world size 2, a flat parameter of 3 elements, shards padded to 2 elements each::

    rank 0 stores [a, b]     rank 1 stores [c, 0]
    numel = 3, members = (Member(("w",), (3,), 0),)
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ..errors import InvalidMetadataError, ShardMismatchError, TiedWeightError, WorldSizeError
from ..format.fields import Fields

FLAT = "flat"
DIM0 = "dim0"

_FORMAT = "xla_fsdp"
_VERSION = 1

_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module")
_SHARD = "_fsdp_shard"
_FLAT_PARAMETER = "flat_param_"


@dataclass(frozen=True)
class Member:
    """One parameter of the model.

    Attributes:
        names: its dotted name, then the names of parameters tied to it.
        shape: shape in the unsharded model; ``()`` for a scalar.
        offset: index of its first element in the joined flat parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class LegacyParameter:
    """One tensor that every rank stores a part of.

    layout ``"flat"``: each rank stores a 1-D chunk; joined, the first `numel` elements are the
    members one after the other and the rest is padding.
    layout ``"dim0"``: each rank stores rows; joined on dimension 0, the first ``shape[0]`` rows
    are the only member and the rest is padding.
    """

    layout: str
    numel: int
    members: tuple[Member, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all members, tied names included."""
        return tuple(name for member in self.members for name in member.names)

    def validate(self, key: str, label: str) -> None:
        """Raise `InvalidMetadataError` unless the members cover `numel` exactly once."""

        def fail(what: str) -> NoReturn:
            raise InvalidMetadataError(f"{label}: parameter {key!r}: {what}")

        if self.layout not in (FLAT, DIM0):
            fail(f"layout is {self.layout!r}, expected {FLAT!r} or {DIM0!r}")
        end = 0
        for member in sorted(self.members, key=lambda m: (m.offset, m.numel)):
            if not member.names or not all(member.names):
                fail("a member has no name")
            if member.offset != end:
                fail(f"{member.names[0]!r} begins at element {member.offset}, expected {end}")
            end += member.numel
        if end != self.numel or not self.members:
            fail(f"members have {end} elements, expected numel {self.numel}")
        if self.layout == DIM0 and (len(self.members) != 1 or not self.members[0].shape):
            fail("layout 'dim0' needs exactly one member with at least one dimension")


@dataclass(frozen=True)
class Buffer:
    """A value that is replicated on every rank. ``dtype``: the one to restore, or None."""

    name: str
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class RankLayout:
    """The tensors of one rank. `parameters`, `buffers` and `aliases` cover its state_dict.

    Attributes:
        aliases: other keys under which the shard of a parameter is stored, mapped to the
            parameter's key.
    """

    world_size: int
    rank: int
    parameters: Mapping[str, LegacyParameter]
    buffers: Mapping[str, Buffer]
    aliases: Mapping[str, str]

    def validate(self, label: str) -> "RankLayout":
        """Return self; raise `WorldSizeError` or `InvalidMetadataError` naming `label`."""
        if not 0 <= self.rank < self.world_size:
            raise WorldSizeError(
                f"{label}: rank {self.rank} is outside a world of {self.world_size} ranks, "
                f"expected 0 to {self.world_size - 1}"
            )
        for key, parameter in self.parameters.items():
            parameter.validate(key, label)
        names = [name for parameter in self.parameters.values() for name in parameter.names]
        names += [buffer.name for buffer in self.buffers.values()]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise InvalidMetadataError(f"{label}: {twice[0]!r} is described more than once")
        return self

    def tie(self, tied: Mapping[str, str]) -> "RankLayout":
        """Add the names in `tied` (``{alias: parameter name}``) to their parameters.

        Raises:
            TiedWeightError: there is no such parameter, or the alias is in use.
        """
        parameters = dict(self.parameters)
        taken = {name for parameter in parameters.values() for name in parameter.names}
        taken |= {buffer.name for buffer in self.buffers.values()}
        for alias, name in tied.items():
            if alias in taken:
                raise TiedWeightError(
                    f"cannot tie {alias!r} to {name!r}: {alias!r} is in the checkpoint already. "
                    "Use another alias."
                )
            owner = next((k for k, p in self.parameters.items() if name in p.names), None)
            if owner is None:
                raise TiedWeightError(
                    f"cannot tie {alias!r} to {name!r}: there is no such parameter {name!r}"
                )
            members = tuple(
                replace(m, names=(*m.names, alias)) if name in m.names else m
                for m in parameters[owner].members
            )
            parameters[owner] = replace(parameters[owner], members=members)
            taken.add(alias)
        return replace(self, parameters=parameters)


def require_keys(parameters: Mapping[str, Any], state_dict: Mapping[str, Any], label: str) -> None:
    """Raise `ShardMismatchError` unless every described parameter is stored as a tensor."""
    for key in parameters:
        if key not in state_dict:
            raise ShardMismatchError(f"{label}: parameter {key!r} is described but not stored")
        if not isinstance(state_dict[key], torch.Tensor):
            raise ShardMismatchError(f"{label}: parameter {key!r} is not a tensor")


def read_native(found: Fields, state_dict: Mapping[str, Any], label: str) -> RankLayout:
    """Translate the metadata of one rank, as this package writes it::

        {"format": "xla_fsdp", "version": 1, "world_size": 4, "rank": 0,
         "parameters": {"fc.weight": {"layout": "flat", "numel": 12, "members": [
             {"names": ["fc.weight", "head.weight"], "shape": [3, 4], "offset": 0}]}},
         "buffers": {"bn.running_mean": "float32"}}

    `parameters` has the keys of the rank's state_dict. `buffers` has the original dtype of buffers
    that were cast. Keys of the state_dict that `parameters` does not have are buffers.

    Raises:
        InvalidMetadataError: the version is unknown, a field is missing or has a wrong type, or the
            members do not cover their parameter.
        ShardMismatchError: a described parameter is not in `state_dict`.
    """
    found.require_format(_FORMAT, _VERSION)
    described = found.child("parameters").children()
    parameters = {key: _read_native_parameter(each) for key, each in described.items()}
    require_keys(parameters, state_dict, label)

    owner = {name: key for key, parameter in parameters.items() for name in parameter.names}
    dtypes = found.child("buffers")
    aliases, buffers = {}, {}
    for key in state_dict:
        if key in parameters:
            continue
        tied_to = owner.get(key) or _same_flat_parameter(key, parameters)
        if tied_to is not None:
            aliases[key] = tied_to
        else:
            buffers[key] = Buffer(key, _read_native_dtype(dtypes, key) if key in dtypes else None)
    world_size, rank = found.integer("world_size", 1), found.integer("rank")
    return RankLayout(world_size, rank, parameters, buffers, aliases).validate(label)


def _same_flat_parameter(key: str, parameters: Mapping[str, LegacyParameter]) -> str | None:
    """Key of the flat parameter that is the same as `key`, because its module has two names.

    Example: ``b.flat_param_0`` is ``a.flat_param_0`` if each of its members has a name in ``b.``.
    """
    path, _, last = key.rpartition(".")
    for other, parameter in parameters.items():
        if other.rpartition(".")[2] == last and all(
            any(name.startswith(f"{path}.") for name in member.names)
            for member in parameter.members
        ):
            return other
    return None


def _read_native_parameter(found: Fields) -> LegacyParameter:
    members = tuple(
        Member(each.names("names"), each.shape("shape"), each.integer("offset"))
        for each in found.objects("members")
    )
    return LegacyParameter(found.text("layout"), found.integer("numel"), members)


def _read_native_dtype(found: Fields, key: str) -> torch.dtype:
    dtype = getattr(torch, found.text(key), None)
    if not isinstance(dtype, torch.dtype):
        found.fail(f"dtype of {key!r} is {found.text(key)!r:.80}, expected a name like 'float32'")
    return dtype


def _clean_name(name: str) -> str:
    """Dotted name without the parts that wrappers add.

    >>> _clean_name("_fsdp_wrapped_module.block._fpw_module.0.weight")
    'block.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def read_intree(found: Fields, state_dict: Mapping[str, Any], label: str) -> RankLayout:
    """Translate the metadata of one rank, as torch_xla's own class writes it.

    ``XlaFullyShardedDataParallel.get_shard_metadata()`` records:

    - ``shard_info[module][shard name]``: original name and size of each sharded tensor.
    - ``flatten_info[flat parameter]``: names, shapes and element counts of the parameters that were
      flattened into it.
    - ``buffer_info[buffer]``: the original dtype of a cast buffer. Its keys have one more wrapper
      prefix than the keys of the state_dict, so both are compared without prefixes. It is empty if
      the module was on the CPU when it was wrapped. Then the original dtype is unknown, and the
      buffers are returned in the stored dtype.

    It does not record:

    - whether a tensor was sharded by rows. A shard with more than one dimension was.
    - the second name of a tied weight. It is lost unless the shared module is itself wrapped; then
      both names are stored. The `tied` argument of the public functions restores it.

    Raises:
        InvalidMetadataError: a field is missing or has a wrong type, or the members do not cover
            their parameter.
        ShardMismatchError: `state_dict` has other shards than the metadata describes.
    """
    flattened = found.child("flatten_info")
    infos = {
        _join(module, name): (module, info)
        for module, shards in found.child("shard_info").children().items()
        for name, info in shards.children().items()
    }
    require_keys(infos, state_dict, label)
    parameters = {
        key: _read_intree_parameter(module, info, flattened, state_dict[key])
        for key, (module, info) in infos.items()
    }

    # Old versions do not write this entry.
    cast = found.child("buffer_info") if "buffer_info" in found else Fields({}, label)
    described = {_clean_name(name): name for name in cast}
    buffers = {}
    for key in state_dict:
        if key in parameters:
            continue
        if any(part.startswith(_SHARD) for part in key.split(".")):
            raise ShardMismatchError(f"{label}: shard {key!r} is stored but not described")
        name = _clean_name(key)
        dtype = _read_intree_dtype(cast.child(described[name])) if name in described else None
        buffers[key] = Buffer(name, dtype)
    world_size, rank = found.integer("world_size", 1), found.integer("rank")
    return RankLayout(world_size, rank, parameters, buffers, aliases={}).validate(label)


def _read_intree_parameter(
    module: str, info: Fields, flattened: Fields, shard: torch.Tensor
) -> LegacyParameter:
    name, shape = info.text("_orig_name"), info.shape("_orig_size")
    # A flat parameter belongs to the wrapper, and a parameter of the model has one more prefix. So
    # a parameter that the model itself calls flat_param_0 is not confused with a flat parameter.
    is_flattened = name.startswith(f"{_WRAPPERS[0]}.{_FLAT_PARAMETER}")
    name = _join(module, name)
    if is_flattened:
        members = _read_flattened(name, flattened)
    else:
        members = (Member((_clean_name(name),), shape, 0),)
    by_rows = shard.dim() > 1
    return LegacyParameter(DIM0 if by_rows else FLAT, math.prod(shape), members)


def _read_flattened(name: str, flattened: Fields) -> tuple[Member, ...]:
    """Members of a flat parameter from its ``(names, shapes, element counts)``."""
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
        full = _clean_name(_join(owner, each.text("name")))
        member = Member((full,), each.shape("shape"), offset)
        if member.numel != each.integer("numel"):
            each.fail(
                f"{full!r} of shape {member.shape} has {member.numel} elements, but its numel is "
                f"{each.integer('numel')}"
            )
        members.append(member)
        offset += member.numel
    return tuple(members)


def _read_intree_dtype(found: Fields) -> torch.dtype:
    dtype = found.json("_orig_dtype")
    if not isinstance(dtype, torch.dtype):
        found.fail(f"_orig_dtype is {dtype!r:.80}, expected a dtype")
    return dtype


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
