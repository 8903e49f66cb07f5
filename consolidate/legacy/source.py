"""Per-rank state_dicts (of this package, or of torch_xla's in-tree class), as a source.

Their optimizer state has numbers instead of names of parameters, in the order in which the
optimizer received them. If it received ``model.parameters()``, that is the order of the state_dict.
In other cases the names are unknown, and reading the optimizer state raises an error.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import torch

from ..errors import ShardMismatchError, UnmatchedOptimizerError
from ..format import values
from ..format.dtypes import dtype_name
from ..format.manifest import Group, Optimizer, State, Tensor
from ..source import Origin
from .files import can_forget, forget, read_ranks, save_id, verify_files
from .layout import Member
from .ranks import Rank, check_consistent, complete_world

# Bytes that are compared at a time, of tied weights that are stored twice.
_COMPARED_BYTES = 1 << 22


@dataclass(frozen=True)
class _ParameterLocation:
    """The key of the tensor that has a parameter, and the member that describes its range."""

    key: str
    member: Member


def open_legacy(
    prefix: str,
    suffix: str,
    tied: Mapping[str, str] | None = None,
    allow_unsafe_pickle: bool = False,
) -> LegacySource:
    """Opens the torch files of all ranks. They are memory-mapped; pages are unloaded after reading.

    The files have no digests, so flipped bits in values are not detected (except by ``--verify``).

    Raises:
        CheckpointError: the files are not a complete and consistent set.
    """
    ranks = read_ranks(prefix, suffix, allow_unsafe_pickle)
    return LegacySource(ranks, f"{prefix}{suffix}", tied, files=True)


class LegacySource:
    """Per-rank state_dicts; see :class:`~..source.Source`.

    ``files``: the ranks are mapped from files, and their labels are the paths. ``False``: they are
    in memory, and only :meth:`state_dict` may be used.

    Raises:
        CheckpointError: the ranks are not a complete and consistent set.
    """

    def __init__(
        self,
        ranks: Iterable[Rank],
        label: str,
        tied: Mapping[str, str] | None = None,
        files: bool = False,
    ):
        self.ranks = complete_world(ranks)
        check_consistent(self.ranks)
        first = self.ranks[0]
        if tied:
            # The names of the result are taken from rank 0 only.
            first = self.ranks[0] = replace(first, layout=first.layout.tie(tied))
        self.label = label
        self.inputs = [rank.label for rank in self.ranks] if files else []
        self.origin = Origin(save_id(self.inputs), None, len(self.ranks))
        self.found = f"{len(self.ranks)} rank files matching {label}"
        self._mapped = files and all(map(can_forget, self.inputs))
        self._places = {
            member.names[0]: _ParameterLocation(key, member)
            for key, parameter in first.layout.parameters.items()
            for member in parameter.members
        }
        self._buffer_keys = {buffer.name: key for key, buffer in first.layout.buffers.items()}
        self.order = list(self._in_order())
        self._check_aliases()

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        return {
            name: Tensor(place.member.names, self._dtype(place.key), place.member.shape)
            for name, place in self._places.items()
        }

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        first, found = self.ranks[0], {}
        for name, key in self._buffer_keys.items():
            value, restore = first.state_dict[key], first.layout.buffers[key].dtype
            if isinstance(value, torch.Tensor):
                cast = None if restore is None else dtype_name(restore, f"{first.label}: {key!r}")
                found[name] = Tensor((name,), self._dtype(key), tuple(value.shape), cast)
        return found

    @property
    def extra_state(self) -> Mapping[str, Any]:
        found = {n: self.ranks[0].state_dict[key] for n, key in self._buffer_keys.items()}
        return {n: value for n, value in found.items() if not isinstance(value, torch.Tensor)}

    def _dtype(self, key: str) -> str:
        first = self.ranks[0]
        return dtype_name(first.state_dict[key].dtype, f"{first.label}: {key!r}")

    def _in_order(self) -> Iterator[tuple[str, str]]:
        """Names in the order of rank 0's state_dict. The members replace their flat parameter."""
        layout, seen = self.ranks[0].layout, set()
        for key in self.ranks[0].state_dict:
            if key in layout.buffers:
                name = layout.buffers[key].name
                yield name, name
                continue
            owner = layout.aliases.get(key, key)
            for member in layout.parameters[owner].members:
                for name in member.names:
                    # A tied name that is also a key of the state_dict is yielded at that key.
                    own = name == key or (key == owner and name not in layout.aliases)
                    if own and name not in seen:
                        seen.add(name)
                        yield name, member.names[0]

    def _check_aliases(self) -> None:
        """Checks that tied weights that are stored under both names have the same bits."""
        for alias, key in self.ranks[0].layout.aliases.items():
            for rank in self.ranks:
                if not self._same(rank.state_dict[alias], rank.state_dict[key]):
                    raise ShardMismatchError(
                        f"{rank.label}: {alias!r} is tied to {key!r} but differs. Tied weights "
                        "must be equal."
                    )

    def _same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether the bits of two tensors are equal. NaN equals NaN."""
        if one is other or (one.is_cpu and other.is_cpu and one.data_ptr() == other.data_ptr()):
            return True
        step = _COMPARED_BYTES // one.itemsize
        for begin in range(0, one.numel(), step):
            end = min(begin + step, one.numel())
            pair = [torch.empty(end - begin, dtype=one.dtype) for _ in range(2)]
            for tensor, out in zip((one, other), pair, strict=True):
                self._copy(tensor, begin, end, out)
            if not torch.equal(*(out.view(torch.uint8) for out in pair)):
                return False
        return True

    @cached_property
    def _matched(self) -> _MatchedState | None:
        return _match_optimizer(self.ranks)

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self._matched is None else self._matched.optimizer

    def read_parameter(self, name: str, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        shards = [rank.state_dict[self._places[name].key] for rank in self.ranks]
        return self._read(shards, self._places[name].member, begin, end, out)

    def read_state(
        self, key: str, name: str, begin: int, end: int, out: torch.Tensor
    ) -> torch.Tensor:
        matched, place = self._matched, self._places[name]
        if matched is None:
            raise ValueError(f"{self.label}: has no optimizer, so it has no state {key!r}")
        return self._read(matched.shards(place.key, key), place.member, begin, end, out)

    def read_buffer(self, name: str, rank: int = 0) -> torch.Tensor:
        rank = rank if rank < len(self.ranks) else 0
        return self.ranks[rank].state_dict[self._buffer_keys[name]].detach()

    def state_dict(self) -> OrderedDict[str, Any]:
        """A copy of the full (unsharded) model. All names of a tied weight share one tensor."""
        full = {name: self._read_full(name) for name in dict.fromkeys(n for _, n in self.order)}
        return OrderedDict((name, full[first]) for name, first in self.order)

    def _read_full(self, name: str) -> Any:
        first = self.ranks[0]
        if name in self._places:
            place = self._places[name]
            shard = first.state_dict[place.key]
            out = torch.empty(place.member.shape, dtype=shard.dtype, device=shard.device)
            self.read_parameter(name, 0, out.numel(), out.view(-1))
            return out
        key = self._buffer_keys[name]
        value, dtype = first.state_dict[key], first.layout.buffers[key].dtype
        if not isinstance(value, torch.Tensor):
            return value
        # Copy in any case, so that the result does not keep the rank's file mapped.
        return value.detach().to(dtype or value.dtype, copy=True)

    @property
    def size(self) -> int:
        return sum(map(os.path.getsize, self.inputs))

    def verify(self, progress: Callable[[int], None]) -> str:
        """Checks the CRCs of the zip files. They detect flipped bits, not files of two steps."""
        verify_files(self.inputs, progress)
        return f"{len(self.inputs)} rank files, CRCs"

    def _read(
        self, shards: list[torch.Tensor], member: Member, begin: int, end: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Reads elements of the concatenated shards, flattened.

        With ``c`` elements in a shard, rank r has ``[r * c, (r + 1) * c)``, also if the shards are
        rows of a matrix.
        """
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
        if part.is_cpu and out.is_cpu:
            # Copy in this thread. torch's thread pool would busy-wait on the cores that read and
            # write.
            plain = part.contiguous().resolve_conj().resolve_neg()
            out.view(torch.uint8).numpy()[:] = plain.view(torch.uint8).numpy()
        else:
            out.copy_(part)
        if self._mapped and tensor.is_contiguous():
            forget(part)


@dataclass(frozen=True)
class _MatchedState:
    """An optimizer, and for each key of the state_dict the optimizer state of each rank."""

    optimizer: Optimizer
    by_key: Mapping[str, list[Mapping[str, Any]]]

    def shards(self, key: str, state: str) -> list[torch.Tensor]:
        """The shards of an optimizer state of all ranks, in rank order."""
        return [each[state] for each in self.by_key[key]]


def _match_optimizer(ranks: list[Rank]) -> _MatchedState | None:
    """Finds the parameter names of the optimizer state. None if the files have no optimizer.

    Raises:
        UnmatchedOptimizerError: it is not certain which parameter has which number.
    """
    if all(rank.optimizer is None for rank in ranks):
        return None
    keys = list(dict.fromkeys(k for k in ranks[0].state_dict if k in ranks[0].layout.parameters))
    found = [_numbered(rank, len(keys)) for rank in ranks]
    group = {k: v for k, v in found[0][1].items() if k != "params"}
    by_key = {key: [state.get(n, {}) for state, _ in found] for n, key in enumerate(keys)}
    names, state = [], {}
    for key in keys:
        described = _describe(key, by_key[key], ranks)
        for member in ranks[0].layout.parameters[key].members:
            names.append(member.names[0])
            if described is not None:
                state[member.names[0]] = described
    where = f"{ranks[0].label}: optimizer"
    options = {key: values.encode(value, f"{where}: {key}") for key, value in group.items()}
    return _MatchedState(Optimizer("unknown", (Group(tuple(names), options),), state), by_key)


def _numbered(rank: Rank, count: int) -> tuple[Mapping[int, Mapping], Mapping[str, Any]]:
    """The state by position of the parameter, and the only parameter group."""

    def fail(what: str) -> NoReturn:
        raise UnmatchedOptimizerError(
            f"{rank.label}: it is not certain which parameters its optimizer state belongs to: "
            f"{what}. Consolidate without --optimizer."
        )

    found = rank.optimizer
    if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
        fail("'optimizer' is not the state_dict of a torch optimizer")
    state, groups = found["state"], found["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, list) or len(groups) != 1:
        fail("it has several parameter groups, and their order is unknown")
    (group,) = groups
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
        fail("its parameter group lists no parameters")
    if len(group["params"]) != count or len(set(map(repr, group["params"]))) != count:
        fail(f"it has {len(group['params'])} parameters, but the model has {count}")
    by_position = {}
    for position, number in enumerate(group["params"]):
        if number in state:
            by_position[position] = state[number]
    if len(by_position) != len(state) or not all(
        isinstance(each, Mapping) and all(isinstance(k, str) and "/" not in k for k in each)
        for each in by_position.values()
    ):
        fail("it has state that belongs to no parameter, or has keys that are not valid")
    return by_position, group


def _describe(key: str, states: list[Mapping[str, Any]], ranks: list[Rank]) -> State | None:
    """Describes the optimizer state of the tensor ``key``, which must be alike on all ranks."""
    sharded: dict[str, str] = {}
    single: dict[str, Any] = {}
    for rank, state in zip(ranks, states, strict=True):
        where = f"{rank.label}: optimizer state of {key!r}"
        if state.keys() != states[0].keys():
            raise UnmatchedOptimizerError(
                f"{where}: has other keys than that of {ranks[0].label}. Consolidate without "
                "--optimizer."
            )
        shard = rank.state_dict[key]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shard.shape and value.dim():
                dtype = dtype_name(value.dtype, f"{where}: {name!r}")
                if sharded.setdefault(name, dtype) == dtype and name not in single:
                    continue
            elif not isinstance(value, torch.Tensor) or value.dim() == 0:
                encoded = {"value": values.encode(value, f"{where}: {name!r}")}
                if isinstance(value, torch.Tensor):
                    encoded["on"] = "host"
                if single.setdefault(name, encoded) == encoded and name not in sharded:
                    continue
            raise UnmatchedOptimizerError(
                f"{where}: {name!r} does not have the shape {list(shard.shape)} of the parameter's "
                f"shard, or differs from that in {ranks[0].label}. Consolidate without --optimizer."
            )
    return State(sharded, single) if states[0] else None
