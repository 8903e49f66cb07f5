"""How the tensors of one rank map to those of the unsharded model, by the metadata of its file.

Both metadata formats, this package's (:func:`read_native`) and that of torch_xla's own class
(:func:`read_intree`), are translated into a `RankLayout`; nothing after that step knows which
format a file was in.

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

    names: its dotted name, then the names of parameters tied to it.
    shape: shape in the unsharded model; ``()`` for a scalar.
    offset: where it begins, in elements of the joined flat parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardedParameter:
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
            fail(f"unknown layout {self.layout!r}, expected {FLAT!r} or {DIM0!r}")
        end = 0
        for member in sorted(self.members, key=lambda m: (m.offset, m.numel)):
            if not member.names or not all(member.names):
                fail("a member has no name")
            if member.offset != end:
                fail(f"{member.names[0]!r} begins at element {member.offset}, expected {end}")
            end += member.numel
        if end != self.numel or not self.members:
            fail(f"members hold {end} elements, expected numel {self.numel}")
        if self.layout == DIM0 and (len(self.members) != 1 or not self.members[0].shape):
            fail("layout 'dim0' needs exactly one member with at least one dimension")


@dataclass(frozen=True)
class Buffer:
    """A value stored whole on every rank. dtype: the one to restore, None to keep it as is."""

    name: str
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds; `parameters`, `buffers` and `aliases` together cover its state_dict.

    aliases: further keys under which the shard of a parameter is stored, mapped to the
    parameter's key.
    """

    world_size: int
    rank: int
    parameters: Mapping[str, ShardedParameter]
    buffers: Mapping[str, Buffer]
    aliases: Mapping[str, str]

    def validate(self, label: str) -> "RankLayout":
        """Return self; raise `WorldSizeError` or `InvalidMetadataError` naming `label`."""
        if not 0 <= self.rank < self.world_size:
            raise WorldSizeError(
                f"{label}: rank {self.rank} is outside a world of {self.world_size}"
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
        """Add the names in `tied` ({further name: name of the parameter}) to their parameters.

        Raises:
            TiedWeightError: there is no such parameter, or the further name is taken.
        """
        parameters = dict(self.parameters)
        taken = {name for parameter in parameters.values() for name in parameter.names}
        taken |= {buffer.name for buffer in self.buffers.values()}
        for alias, name in tied.items():
            if alias in taken:
                raise TiedWeightError(f"cannot tie {alias!r} to {name!r}: {alias!r} is stored")
            owner = next((k for k, p in self.parameters.items() if name in p.names), None)
            if owner is None:
                raise TiedWeightError(f"cannot tie {alias!r} to {name!r}: no such parameter")
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

    `parameters` is keyed as the rank's state_dict; `buffers` holds the original dtype of the
    buffers that were cast. Whatever `parameters` does not describe is a buffer.

    Raises:
        InvalidMetadataError: unknown version, missing or ill-typed fields, members that do not fit.
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
    world_size, rank = found.whole("world_size", 1), found.whole("rank")
    return RankLayout(world_size, rank, parameters, buffers, aliases).validate(label)


def _same_flat_parameter(key: str, parameters: Mapping[str, ShardedParameter]) -> str | None:
    """Key of the flat parameter that `key` lists once more, because its module has two names.

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


def _read_native_parameter(found: Fields) -> ShardedParameter:
    members = tuple(
        Member(each.names("names"), each.shape("shape"), each.whole("offset"))
        for each in found.objects("members")
    )
    return ShardedParameter(found.text("layout"), found.whole("numel"), members)


def _read_native_dtype(found: Fields, key: str) -> torch.dtype:
    dtype = getattr(torch, found.text(key), None)
    if not isinstance(dtype, torch.dtype):
        found.fail(f"dtype of {key!r} is {found.text(key)!r:.80}, not like 'float32'")
    return dtype


def _clean_name(name: str) -> str:
    """Dotted name without the components that the wrappers add.

    >>> _clean_name("_fsdp_wrapped_module.block._fpw_module.0.weight")
    'block.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def read_intree(found: Fields, state_dict: Mapping[str, Any], label: str) -> RankLayout:
    """Translate the metadata of one rank, as torch_xla's own class gives it.

    What ``XlaFullyShardedDataParallel.get_shard_metadata()`` records, and what follows from that:

    - ``shard_info[module][shard name]``: original name and size of each sharded tensor.
    - ``flatten_info[flat parameter]``: names, shapes and element counts of what was flattened into
      it.
    - ``buffer_info[buffer]``: the original dtype of a cast buffer. Its keys carry one more wrapper
      prefix than the keys of the state_dict, so both are compared without prefixes. It is empty
      when the module was wrapped while on the CPU: such buffers can only be returned as they were
      stored.
    - Whether a tensor was sharded by rows is not recorded: a shard with more than one dimension
      was.
    - The second name of a tied weight is not recorded. It is lost unless the shared module is
      itself wrapped (then both names are stored); the `tied` argument of the public functions
      restores it.

    Raises:
        InvalidMetadataError: missing or ill-typed fields, members that do not fit.
        ShardMismatchError: `state_dict` holds other shards than the metadata describes.
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

    # Written by old versions without the entry at all.
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
    world_size, rank = found.whole("world_size", 1), found.whole("rank")
    return RankLayout(world_size, rank, parameters, buffers, aliases={}).validate(label)


def _read_intree_parameter(
    module: str, info: Fields, flattened: Fields, shard: torch.Tensor
) -> ShardedParameter:
    name, shape = info.text("_orig_name"), info.shape("_orig_size")
    # A flat parameter sits directly on the wrapper, a parameter of the model below one more prefix;
    # so one that the model itself calls flat_param_0 is not mistaken.
    is_flattened = name.startswith(f"{_WRAPPERS[0]}.{_FLAT_PARAMETER}")
    name = _join(module, name)
    if is_flattened:
        members = _read_flattened(name, flattened)
    else:
        members = (Member((_clean_name(name),), shape, 0),)
    by_rows = shard.dim() > 1
    return ShardedParameter(DIM0 if by_rows else FLAT, math.prod(shape), members)


def _read_flattened(name: str, flattened: Fields) -> tuple[Member, ...]:
    """Members of a flat parameter from its ``(names, shapes, element counts)``."""
    value = flattened.list(name)
    if len(value) != 3 or any(not isinstance(column, (list, tuple)) for column in value):
        flattened.fail(f"{name!r:.80} is not (names, shapes, numels)")
    if not len(value[0]) == len(value[1]) == len(value[2]):
        flattened.fail(f"{name!r:.80} has {len(value[0])} names but other counts")
    owner = name.rpartition(".")[0]
    members, offset = [], 0
    for row in zip(*value, strict=True):
        each = Fields(dict(zip(("name", "shape", "numel"), row, strict=True)), flattened.label)
        full = _clean_name(_join(owner, each.text("name")))
        member = Member((full,), each.shape("shape"), offset)
        if member.numel != each.whole("numel"):
            each.fail(f"{full!r} of shape {member.shape} has not {each.whole('numel')} elements")
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
