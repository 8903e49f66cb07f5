"""Per-rank state_dicts (of this package, or of torch_xla's in-tree class), as a source.

The numbers in their optimizer state follow the order of the state_dict only if the optimizer
received ``model.parameters()``.
"""

from __future__ import annotations

import ctypes
import glob
import mmap
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch

from ..errors import (
    CheckpointNotFoundError,
    MissingRankError,
    ShardMismatchError,
    UnmatchedOptimizerError,
    UnreadableFileError,
    UnsafeFileError,
    first_line,
)
from ..format import values
from ..format.digests import digest
from ..format.dtypes import copy_into, dtype_name, flatten_on_host, is_dense
from ..format.manifest import NOT_OPTIONS, Group, Manifest, Optimizer, State, Tensor
from .ranks import Rank, read_rank, sort_ranks, tie

OUTPUT_NAME = "_consolidated.pth"


def open_legacy(
    prefix: str,
    suffix: str,
    tied: Mapping[str, str] | None = None,
    allow_unsafe_pickle: bool = False,
) -> LegacySource:
    """Opens the torch files of all ranks, memory-mapped. Raises CheckpointError.

    The files have no digests: only ``--verify`` detects flipped bits in values.
    """
    paths = sorted(glob.glob(glob.escape(prefix) + suffix))
    if not paths:
        raise CheckpointNotFoundError(
            f"{prefix}{suffix}: no file matches, and {prefix} is no folder of a checkpoint. "
            "Check the prefix and the suffix."
        )
    ranks = []
    for path in paths:
        content = read_file(path, allow_unsafe_pickle)
        if not _is_consolidated(content, path == prefix + OUTPUT_NAME):
            ranks.append(read_rank(content, path))
            for key in ranks[-1].parameters:
                _require_bytes_stored(key, ranks[-1])
    if not ranks:
        raise MissingRankError(
            f"{paths[0]}: is a consolidated model, and no rank file matches. Check the prefix and "
            "the suffix."
        )
    return LegacySource(ranks, f"{prefix}{suffix}", tied, files=True)


class LegacySource:
    """Per-rank state_dicts, with the attributes of :class:`~..stream.sources.ShardedSource`.

    ``files``: the labels of ``ranks`` are the paths of their mapped files. Otherwise, only
    :meth:`state_dict` may be used. Raises CheckpointError.
    """

    step = None

    def __init__(
        self,
        ranks: list[Rank],
        label: str,
        tied: Mapping[str, str] | None = None,
        files: bool = False,
    ):
        self.ranks = sort_ranks(ranks)
        first = self.ranks[0]
        tie(first, tied or {})
        self.label, self.world_size = label, len(self.ranks)
        self.inputs = [rank.label for rank in self.ranks] if files else []
        # Another one when one of the files is written again.
        status = [(os.path.basename(path), os.stat(path)) for path in self.inputs]
        identity = [(name, found.st_size, found.st_mtime_ns) for name, found in status]
        self.save_id = digest(repr(identity).encode())
        self.found = f"{len(self.ranks)} rank files matching {label}"
        self._mapped = files and all(map(_can_forget, self.inputs))
        # By parameter: the key of its tensor, and its range in that.
        self._places = {
            member.names[0]: (key, member)
            for key, parameter in first.parameters.items()
            for member in parameter.members
        }
        self._buffer_keys = {name: key for key, (name, _) in first.buffers.items()}
        self.order = list(self._in_order())
        self._check_aliases()

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        return {
            name: Tensor(member.names, self._dtype(key), member.shape)
            for name, (key, member) in self._places.items()
        }

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        first, found = self.ranks[0], {}
        for key, (name, restore) in first.buffers.items():
            value = first.state_dict[key]
            if is_dense(value):
                cast = None if restore is None else dtype_name(restore, f"{first.label}: {key!r}")
                found[name] = Tensor((name,), self._dtype(key), tuple(value.shape), cast)
        return found

    @property
    def extra_state(self) -> Mapping[str, Any]:
        found = {n: self.ranks[0].state_dict[key] for n, key in self._buffer_keys.items()}
        return {n: value for n, value in found.items() if not is_dense(value)}

    @property
    def manifest(self) -> Manifest:
        """Without the optimizer. Raises UnsupportedValueError for the extra state."""
        extra = values.encode(dict(self.extra_state), f"{self.label}: extra state")
        tensors = self.parameters, self.buffers
        return Manifest(self.save_id, 0, self.world_size, *tensors, (), extra_state=extra or None)

    def _dtype(self, key: str) -> str:
        first = self.ranks[0]
        return dtype_name(first.state_dict[key].dtype, f"{first.label}: {key!r}")

    def _in_order(self) -> Iterator[tuple[str, str]]:
        """Names in the order of rank 0's state_dict. Members replace their flat parameter."""
        first, seen = self.ranks[0], set()
        for key in first.state_dict:
            if key in first.buffers:
                name, _ = first.buffers[key]
                yield name, name
                continue
            owner = first.aliases.get(key, key)
            for member in first.parameters[owner].members:
                for name in member.names:
                    # A tied name that is also a key of the state_dict is yielded at that key.
                    own = name == key or (key == owner and name not in first.aliases)
                    if own and name not in seen:
                        seen.add(name)
                        yield name, member.names[0]

    def _check_aliases(self) -> None:
        for alias, key in self.ranks[0].aliases.items():
            for rank in self.ranks:
                pair = [flatten_on_host(rank.state_dict[name]) for name in (alias, key)]
                equal = torch.equal(*(flat.view(torch.uint8) for flat in pair))
                self._forget(pair)
                if not equal:
                    raise ShardMismatchError(
                        f"{rank.label}: {alias!r} is tied to {key!r} but differs. Tied weights "
                        "must be equal."
                    )

    def _forget(self, parts: list[torch.Tensor]) -> None:
        for part in parts if self._mapped else ():
            _forget(part)

    @cached_property
    def _matched(self) -> tuple[Optimizer, dict[str, list[Mapping[str, Any]]]] | None:
        return _merge_optimizers(self.ranks)

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self._matched is None else self._matched[0]

    def read(self, name: str, begin: int, end: int, state: str | None = None) -> torch.Tensor:
        key, member = self._places[name]
        shards = [rank.state_dict[key] for rank in self.ranks]
        if state is not None:
            if self._matched is None:
                raise ValueError(f"{self.label}: has no optimizer, so it has no state {state!r}")
            shards = [each[state] for each in self._matched[1][key]]
        # All shards have the same length.
        out = torch.empty(end - begin, dtype=shards[0].dtype, device=shards[0].device)
        count = shards[0].numel()
        at, low, high = 0, member.offset + begin, member.offset + end
        while low < high:
            rank, first = divmod(low, count)
            length = min(high - low, count - first)
            part = shards[rank].detach().reshape(-1)[first : first + length]
            copy_into(out[at : at + length], part)
            self._forget([part])
            at, low = at + length, low + length
        return out

    def read_buffer(self, name: str, begin: int, end: int, rank: int = 0) -> torch.Tensor:
        rank = rank if rank < len(self.ranks) else 0
        return flatten_on_host(self.ranks[rank].state_dict[self._buffer_keys[name]])[begin:end]

    def state_dict(self) -> OrderedDict[str, Any]:
        """The unsharded model, copied. All names of a tied weight share one tensor."""
        full = {name: self._read_full(name) for name in dict.fromkeys(n for _, n in self.order)}
        return OrderedDict((name, full[first]) for name, first in self.order)

    def _read_full(self, name: str) -> Any:
        first = self.ranks[0]
        if name in self._places:
            key, member = self._places[name]
            return self.read(name, 0, member.numel).view(member.shape)
        key = self._buffer_keys[name]
        value, dtype = first.state_dict[key], first.buffers[key][1]
        if not isinstance(value, torch.Tensor):
            return value
        # A view would keep the rank's file mapped.
        return value.detach().to(dtype or value.dtype, copy=True)

    @property
    def size(self) -> int:
        return sum(map(os.path.getsize, self.inputs))

    def verify(self, progress: Callable[[int], object]) -> str:
        _verify_files(self.inputs, progress)
        return f"{len(self.inputs)} rank files, CRCs"


def _merge_optimizers(
    ranks: list[Rank],
) -> tuple[Optimizer, dict[str, list[Mapping[str, Any]]]] | None:
    """The optimizer with names, and by key the state of each rank. None without an optimizer."""
    if all(rank.optimizer is None for rank in ranks):
        return None
    first = ranks[0]
    keys = [key for key in first.state_dict if key in first.parameters]
    found = [_numbered(rank, len(keys)) for rank in ranks]
    by_key = {key: [state.get(n, {}) for state, _ in found] for n, key in enumerate(keys)}
    names, state = [], {}
    for key in keys:
        described = _merge_states(key, by_key[key], ranks)
        for member in first.parameters[key].members:
            names.append(member.names[0])
            if described is not None:
                state[member.names[0]] = described
    options = {
        key: values.encode(value, f"{first.label}: optimizer: {key}")
        for key, value in found[0][1].items()
        if key not in NOT_OPTIONS
    }
    return Optimizer("unknown", (Group(tuple(names), options),), state), by_key


def _numbered(rank: Rank, count: int) -> tuple[Mapping[int, Mapping], Mapping[str, Any]]:
    def fail(what: str) -> NoReturn:
        raise UnmatchedOptimizerError(
            f"{rank.label}: it is not certain which parameters its optimizer state belongs to: "
            f"{what}. Consolidate without --optimizer."
        )

    found = rank.optimizer
    if rank.ignored:
        fail(f"its wrapper ignores {rank.ignored[0]!r:.120}, which the optimizer may have")
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


def _merge_states(key: str, states: list[Mapping[str, Any]], ranks: list[Rank]) -> State | None:
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


def read_file(
    path: str, allow_unsafe_pickle: bool = False, remedy: str = "--allow_unsafe_pickle would"
) -> Any:
    """Content of a torch file, memory-mapped. Files of torch before 1.6 are read completely.

    With ``allow_unsafe_pickle``, code in the file runs. Raises UnreadableFileError, and
    UnsafeFileError with the advice ``remedy`` for objects that torch does not consider safe.
    """
    if not os.path.isfile(path):
        raise UnreadableFileError(f"{path}: not a regular file")
    try:
        is_zip = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            # Below, plain pickles raise a better error.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
            safe = not allow_unsafe_pickle
            return torch.load(path, map_location="cpu", weights_only=safe, mmap=is_zip)
    except MemoryError:
        raise
    except Exception as error:
        unsafe = _unsafe_globals(path, error)
        if unsafe:
            raise UnsafeFileError(
                f"{path}: needs {unsafe}, which is not safe to load; nothing was executed"
                f" ({remedy})"
            ) from error
        # torch's message recommends to load without weights_only.
        shown = UnpicklingError() if isinstance(error, UnpicklingError) else error
        raise UnreadableFileError(
            f"{path}: cannot be read (truncated, corrupt or not a checkpoint):"
            f" {first_line(shown):.120}"
        ) from error


def _unsafe_globals(path: str, error: Exception) -> str:
    if not isinstance(error, UnpicklingError):
        return ""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        # Not a zip file: only the message has the name.
        refused = re.search(r"unsupported global:? (?:GLOBAL )?(\S+)", str(error), re.IGNORECASE)
        return refused[1] if refused else ""
    return ", ".join(sorted(found)[:4])


def _is_consolidated(content: Any, default_name: bool) -> bool:
    """Whether it is a result. The in-tree class gives its results only a default name."""
    if not isinstance(content, Mapping) or "shard_metadata" in content:
        return False
    return "consolidated" in content or (default_name and content.keys() == {"model"})


def _require_bytes_stored(key: str, rank: Rank) -> None:
    """Checks the bytes of a shard: with stride 0, a small file could have a huge tensor."""
    shard = rank.state_dict[key]
    if shard.numel() * shard.element_size() > shard.untyped_storage().nbytes():
        raise ShardMismatchError(
            f"{rank.label}: shard {key!r} of shape {list(shard.shape)} has fewer bytes than that "
            "shape needs. Save it as a contiguous tensor."
        )


def _verify_files(paths: list[str], progress: Callable[[int], object]) -> None:
    """Checks CRCs. Raises UnreadableFileError; files of torch before 1.6 have none."""
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # zipfile raises many kinds
            raise UnreadableFileError(
                f"{path}: is not a zip file, so it has no CRCs to check. Save it with torch 1.6 or "
                "later."
            ) from error
        if damaged is not None:
            raise UnreadableFileError(
                f"{path}: the bytes of {damaged} are not those that were saved (their CRC differs)."
                " Use another checkpoint."
            )
        progress(os.path.getsize(path))


def _can_forget(path: str) -> bool:
    """Whether pages may be unloaded. Not if torch reversed the bytes (big-endian) in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            order = next(n for n in archive.namelist() if n.endswith("/byteorder"))
            return archive.getinfo(order).file_size < 16 and archive.read(order) == b"little"
    except Exception:
        return False  # not a zip file, or without a byte order


def _forget(part: torch.Tensor) -> None:
    """Unloads the pages in ``part``, which count as memory of the process."""
    page = mmap.PAGESIZE
    begin = -(-part.data_ptr() // page) * page
    end = (part.data_ptr() + part.numel() * part.element_size()) // page * page
    if begin < end and part.is_contiguous():
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
