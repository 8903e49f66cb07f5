"""How the tensors of one rank map to the tensors of the unsharded model.

Both metadata formats (``native.py``, ``intree.py``) are translated into a `RankLayout`; nothing
after that step knows which format a file was in.

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

FLAT = "flat"
DIM0 = "dim0"


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
