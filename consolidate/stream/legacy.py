"""Per-rank torch files (of this package, or of torch_xla's in-tree class), as a source."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..checkpoints import OUTPUT_NAME, read_ranks
from ..errors import CheckpointError, ShardMismatchError, UnreadableFileError
from ..format.digests import digest
from ..format.dtypes import dtype_name
from ..format.manifest import Optimizer, Tensor
from ..layout import Member
from ..ranks import Rank, check_consistent, complete_world
from ..storage import find_files
from . import mapped
from .legacy_optimizer import MatchedState, match_optimizer
from .source import Origin
from .tensors import PIECE_BYTES, copy


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: by the key of the tensor it is in, from element ``member.offset``."""

    key: str
    member: Member


class LegacySource:
    """See :class:`~.source.Source`. The files are mapped; what was read of them is let go of.

    There are no digests: flipped bits in values pass unnoticed (but see ``--verify``).

    Raises:
        CheckpointError: the files are not one complete, consistent set.
    """

    def __init__(
        self,
        prefix: str,
        suffix: str,
        tied: Mapping[str, str] | None = None,
        allow_unsafe_pickle: bool = False,
    ):
        paths = find_files(prefix, suffix)
        world = complete_world(read_ranks(paths, prefix + OUTPUT_NAME, allow_unsafe_pickle))
        check_consistent(world)
        if tied:
            world = [replace(world[0], layout=world[0].layout.tie(tied)), *world[1:]]
        self.ranks = world
        self.label = f"{prefix}{suffix}"
        self.inputs = [rank.label for rank in world]
        self.origin = Origin(_save_id(self.inputs), None, len(world))
        self.mapped = all(mapped.can_forget(path) for path in self.inputs)
        self._places: dict[str, _Place] = {}
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.extra_state: dict[str, Any] = {}
        self._buffer_keys: dict[str, str] = {}
        self._describe()
        self.order = list(self._in_order())
        self._check_aliases()

    def _describe(self) -> None:
        first = self.ranks[0]
        for key, parameter in first.layout.parameters.items():
            for rank in self.ranks:
                _require_stored(key, rank)
            dtype = dtype_name(first.state_dict[key].dtype, f"{first.label}: {key!r}")
            for member in parameter.members:
                tensor = Tensor(member.names, dtype, member.shape)
                self.parameters[tensor.name] = tensor
                self._places[tensor.name] = _Place(key, member)
        for key, buffer in first.layout.buffers.items():
            value = first.state_dict[key]
            if not isinstance(value, torch.Tensor):
                self.extra_state[buffer.name] = value
                continue
            where = f"{first.label}: {key!r}"
            restore = buffer.dtype and dtype_name(buffer.dtype, where)
            stored = dtype_name(value.dtype, where)
            self.buffers[buffer.name] = Tensor((buffer.name,), stored, tuple(value.shape), restore)
            self._buffer_keys[buffer.name] = key

    def _in_order(self) -> Iterator[tuple[str, str]]:
        """As rank 0 lists them, the members of a flat parameter in its place."""
        layout, seen = self.ranks[0].layout, set()
        for key in self.ranks[0].state_dict:
            if key in layout.buffers:
                name = layout.buffers[key].name
                yield name, name
                continue
            owner = layout.aliases.get(key, key)
            for member in layout.parameters[owner].members:
                for name in member.names:
                    # A tied name that rank 0 lists itself is left for its own place in the order.
                    own = name == key or (key == owner and name not in layout.aliases)
                    if own and name not in seen:
                        seen.add(name)
                        yield name, member.names[0]

    def _check_aliases(self) -> None:
        """Tied weights stored under both names must agree, or one of them would be lost."""
        for alias, key in self.ranks[0].layout.aliases.items():
            for rank in self.ranks:
                one, other = rank.state_dict[alias], rank.state_dict[key]
                if one.data_ptr() != other.data_ptr() and not self._same(one, other):
                    raise ShardMismatchError(
                        f"{rank.label}: {alias!r} is tied to {key!r} but differs"
                    )

    def _same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Bit for bit, since NaN is not equal to itself."""
        step = PIECE_BYTES // one.itemsize
        for begin in range(0, one.numel(), step):
            end = min(begin + step, one.numel())
            pair = [each.new_empty(end - begin) for each in (one, other)]
            for tensor, out in zip((one, other), pair, strict=True):
                self._copy(tensor, begin, end, out)
            if not torch.equal(*(out.view(torch.uint8) for out in pair)):
                return False
        return True

    @cached_property
    def _matched(self) -> MatchedState | None:
        return match_optimizer(self.ranks)

    @property
    def optimizer(self) -> Optimizer | None:
        return self._matched and self._matched.optimizer

    def read_parameter(self, name: str, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        shards = [rank.state_dict[self._places[name].key] for rank in self.ranks]
        return self._read(shards, self._places[name].member, begin, end, out)

    def read_state(
        self, key: str, name: str, begin: int, end: int, out: torch.Tensor
    ) -> torch.Tensor:
        place = self._places[name]
        return self._read(self._matched.shards(place.key, key), place.member, begin, end, out)

    def read_buffer(self, name: str, rank: int = 0) -> torch.Tensor:
        rank = rank if rank < len(self.ranks) else 0
        return self.ranks[rank].state_dict[self._buffer_keys[name]].detach()

    def _read(
        self, shards: list[torch.Tensor], member: Member, begin: int, end: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Elements of the shards put together, in order of rank, flattened: rank r has ``[r * c,
        (r + 1) * c)`` of them, whether it stores a vector or rows."""
        count = shards[0].numel()
        at, low, high = 0, member.offset + begin, member.offset + end
        while low < high:
            rank, first = divmod(low, count)
            length = min(high - low, count - first)
            self._copy(shards[rank], first, first + length, out[at : at + length])
            at, low = at + length, low + length
        return out

    def _copy(self, tensor: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        part = tensor.detach().reshape(-1)[begin:end]
        copy(part, out)
        if self.mapped and tensor.is_contiguous():
            mapped.forget(part)


def _require_stored(key: str, rank: Rank) -> None:
    """A few bytes can be given the shape of many (stride 0), and would fill the disk."""
    shard = rank.state_dict[key]
    if shard.numel() * shard.element_size() > shard.untyped_storage().nbytes():
        raise ShardMismatchError(
            f"{rank.label}: shard {key!r} of shape {list(shard.shape)} has fewer bytes than that"
        )


def _save_id(paths: list[str]) -> str:
    """Changes whenever one of the files is written again; there is nothing better in them."""
    found = [(os.path.basename(p), os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in paths]
    return digest(repr(found).encode())


def verify_files(paths: list[str]) -> int:
    """Compares the zip files' CRCs; returns the number of bytes.

    Raises:
        UnreadableFileError: one differs, or a file is from before torch 1.6 and has none.
    """
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except CheckpointError:
            raise
        except Exception as error:  # zipfile lets many things escape
            raise UnreadableFileError(f"{path}: no zip file whose bytes can be checked") from error
        if damaged is not None:
            raise UnreadableFileError(
                f"{path}: the bytes of {damaged} are not those that were saved (CRC); use another"
                " checkpoint"
            )
    return sum(os.path.getsize(path) for path in paths)
