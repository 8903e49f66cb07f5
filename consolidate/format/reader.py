"""Reads any range of any tensor of a checkpoint, from the files of all ranks, and checks it.

Opening the file of a rank checks that it belongs to the manifest and matches it.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..errors import (
    CheckpointError,
    CorruptFileError,
    CoverageError,
    InvalidMetadataError,
    MissingRankError,
    MixedSaveError,
    ShardMismatchError,
)
from . import folders, manifest
from .container import Entry
from .dtypes import DTYPES
from .manifest import (
    Manifest,
    Tensor,
    buffer_key,
    file_name,
    load_manifest,
    parameter_key,
    state_key,
)
from .rank_file import (
    CACHED_BYTES,
    MOST_CACHED_BYTES,
    CheckedFile,
    ChunkCache,
    FileRecord,
)
from .store import Store, join, open_store, read
from .strict import read_json

_RANK_FILE = re.compile(r"rank-\d+-of-\d+\..*")
# begin, end, rank: the range of elements of a tensor that a rank stores.
Piece = tuple[int, int, int]


def _cached_bytes(files: Iterable[FileRecord]) -> int:
    """Size of the cache of chunks: enough for one chunk of each file, within limits.

    A smaller cache would read a chunk again for each tensor in it, when tensors are read one after
    the other.
    """
    each = sum(min(file.chunk, file.size) for file in files)
    return min(max(each, CACHED_BYTES), MOST_CACHED_BYTES)


class ShardedCheckpoint:
    """One checkpoint, read-only. Opening it reads the manifest and the names in the folder.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no checkpoint at the path.
        CorruptFileError, InvalidMetadataError: the manifest is damaged.
        MissingRankError, MixedSaveError: a file is missing, or is of another save.
    """

    def __init__(self, path: Any, store: Store | None = None):
        """``store``: if given, ``path`` is the folder of a checkpoint in this store."""
        found: tuple[Store, str] = (
            folders.resolve_checkpoint(path) if store is None else (store, path)
        )
        self.store, self.folder = found
        label = join(self.folder, manifest.NAME)
        size = self.store.size(label)
        if size > manifest.MAX_BYTES:
            raise CorruptFileError(
                f"{label}: has {size} bytes, a manifest has at most {manifest.MAX_BYTES}. Use "
                "another checkpoint."
            )
        if not manifest.is_begun(self.store, label):
            raise CorruptFileError(f"{label}: is not a manifest. Use another checkpoint.")
        self.manifest = load_manifest(read(self.store, label, 0, size), label)
        self._files: dict[int, RankFile] = {}
        self._cache = ChunkCache(_cached_bytes(self.manifest.files))
        self._pieces: dict[str, list[Piece]] | None = None
        self._as_stated: set[int] = set()
        place = folders.parse_folder_name(self.folder.rpartition("/")[2])
        if place is not None and place.step != self.manifest.step:
            raise MixedSaveError(
                f"{label}: is of step {self.manifest.step}, but its folder is named after step "
                f"{place.step}. The folder was renamed, or files were exchanged."
            )
        self._require_exact_files()

    def _require_exact_files(self) -> None:
        expected = [record.name for record in self.manifest.files]
        found = {name for name in self.store.list(self.folder) if _RANK_FILE.fullmatch(name)}
        missing = sorted(set(expected) - found)
        if missing:
            raise MissingRankError(
                f"{join(self.folder, missing[0])}: is missing. The manifest lists "
                f"{len(expected)} files, and {len(missing)} of them do not exist. Copy all files "
                "of the checkpoint."
            )
        more = sorted(found - set(expected))
        if more:
            raise MixedSaveError(
                f"{join(self.folder, more[0])}: is not listed in the manifest of "
                f"{self.manifest.world_size} ranks. It belongs to another save: remove it."
            )

    def file(self, rank: int) -> RankFile:
        """The file of a rank, after a check of its header."""
        if rank not in self._files:
            self._files[rank] = RankFile(self.store, self.folder, self.manifest, rank, self._cache)
        return self._files[rank]

    def files(self) -> Iterator[RankFile]:
        """The files of all ranks, in rank order."""
        return (self.file(rank) for rank in range(self.manifest.world_size))

    def pieces(self, name: str) -> list[Piece]:
        """The pieces of a parameter in order. They cover every element exactly once.

        Raises:
            CoverageError: an element of any parameter is missing or stored twice.
        """
        if self._pieces is None:
            self._pieces = self._all_pieces()
        return self._pieces[name]

    def _all_pieces(self) -> dict[str, list[Piece]]:
        pieces: dict[str, list[Piece]] = {name: [] for name in self.manifest.parameters}
        for rank, file in enumerate(self.files()):
            for name in self.manifest.parameters:
                length = file.length(name)
                if length:
                    begin = file.begins.get(name, 0)
                    pieces[name].append((begin, begin + length, rank))
        for name, tensor in self.manifest.parameters.items():
            end = 0
            for begin, until, rank in sorted(pieces[name]):
                if begin != end:
                    what = "no rank has" if begin > end else "two ranks have"
                    raise CoverageError(
                        f"{self.file(rank).path}: {what} elements {min(begin, end)} to "
                        f"{max(begin, end)} of parameter {name!r}. Use another checkpoint."
                    )
                end = until
            if end != tensor.numel:
                raise CoverageError(
                    f"{self.folder}: no rank has elements {end} to {tensor.numel} of parameter "
                    f"{name!r}. Use another checkpoint."
                )
            pieces[name].sort()
        self._require_state(pieces)
        self._require_buffers(self.files())
        if self.manifest.sharding_rules is not None:
            for rank in range(self.manifest.world_size):
                self._checked_file(rank)
        return pieces

    def _files_with_elements(
        self, name: str, begin: int, end: int
    ) -> Iterator[tuple[int, int, RankFile]]:
        """The files that have elements in the range ``begin .. end`` of a parameter.

        Yields the range of the piece in each file, which may be larger, and the file.
        """
        sharding_rules, numel = self.manifest.sharding_rules, self.manifest.parameters[name].numel
        if sharding_rules is not None and self._pieces is None:
            for low, high, rank in sharding_rules[name].pieces(numel, begin, end):
                if rank >= self.manifest.world_size:
                    raise CoverageError(
                        f"{join(self.folder, manifest.NAME)}: says that rank {rank} has elements "
                        f"{low} to {high} of {name!r}, but there are {self.manifest.world_size} "
                        "ranks. Use another checkpoint."
                    )
                yield low, high, self._checked_file(rank)
            return
        pieces = self.pieces(name)
        # Start at the piece that has the element `begin`.
        first = max(bisect_right(pieces, begin, key=lambda piece: piece[0]) - 1, 0)
        for low, high, rank in pieces[first:]:
            if low >= end:
                break
            yield low, high, self.file(rank)

    def _checked_file(self, rank: int) -> RankFile:
        """The file of a rank, after a check that it has the elements that the spans say."""
        file = self.file(rank)
        if rank not in self._as_stated:
            assert self.manifest.sharding_rules is not None
            for name, rule in self.manifest.sharding_rules.items():
                begin, end = rule.range_of_rank(rank, self.manifest.parameters[name].numel)
                found = file.begins.get(name, 0), file.length(name)
                if found != (begin, end - begin):
                    raise CoverageError(
                        f"{file.path}: has {found[1]} elements of {name!r} from {found[0]}, but "
                        f"the manifest says {end - begin} from {begin}. Use another checkpoint."
                    )
            mine = {name: [(0, 0, rank)] for name in self.manifest.parameters if file.length(name)}
            self._require_state(mine)
            self._require_buffers([file])
            self._as_stated.add(rank)
        return file

    def _require_state(self, pieces: dict[str, list[Piece]]) -> None:
        """Checks that each rank with a piece of a parameter has its optimizer state too."""
        optimizer = self.manifest.optimizer
        for name, state in optimizer.state.items() if optimizer is not None else ():
            for key in state.sharded:
                for _, _, rank in pieces.get(name, ()):
                    if state_key(key, name) not in self.file(rank).container.entries:
                        raise CoverageError(
                            f"{self.file(rank).path}: has a piece of {name!r}, but not of its "
                            f"optimizer state {key!r}. Use another checkpoint."
                        )

    def _require_buffers(self, files: Iterable[RankFile]) -> None:
        """Checks that each file has all buffers."""
        for file in files:
            for name in self.manifest.buffers:
                if buffer_key(name) not in file.container.entries:
                    raise ShardMismatchError(
                        f"{file.path}: lacks buffer {name!r}. Use another checkpoint."
                    )

    def read_parameter(
        self, name: str, begin: int, end: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reads the elements ``begin <= i < end`` of a flattened parameter, in its dtype.

        ``out``: a contiguous one-dimensional tensor of that dtype and size to fill.
        """
        return self._read(None, name, begin, end, self.manifest.parameters[name].dtype, out)

    def read_state(
        self, key: str, name: str, begin: int, end: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reads elements of a sharded optimizer state, like :meth:`read_parameter`."""
        optimizer = self.manifest.optimizer
        if optimizer is None:
            raise ValueError(f"{self.folder}: has no optimizer, so it has no state {key!r}")
        return self._read(key, name, begin, end, optimizer.state[name].sharded[key], out)

    def _read(
        self,
        state: str | None,
        name: str,
        begin: int,
        end: int,
        dtype: str,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        count = self.manifest.parameters[name].numel
        if not 0 <= begin <= end <= count:
            raise ValueError(f"{name!r} has {count} elements, so {begin} to {end} is not a range")
        if out is None:
            out = torch.empty(end - begin, dtype=DTYPES[dtype])
        self.read_to(out, state, name, begin)
        return out

    def read_to(self, out: torch.Tensor, state: str | None, name: str, begin: int) -> None:
        """Fills ``out`` with the elements of a parameter, or of its ``state``, from ``begin``.

        ``out`` must be contiguous and one-dimensional.
        """
        key = parameter_key(name) if state is None else state_key(state, name)
        end = begin + out.numel()
        for low, high, file in self._files_with_elements(name, begin, end):
            start, stop = max(low, begin), min(high, end)
            if start < stop:
                file.read_to(out[start - begin : stop - begin], key, start - low)

    def read_buffer(self, name: str, rank: int = 0) -> torch.Tensor:
        """Reads a buffer with the values of ``rank``."""
        tensor = self.manifest.buffers[name]
        key = buffer_key(name)
        if key not in self.file(rank).container.entries:
            raise ShardMismatchError(
                f"{self.file(rank).path}: lacks buffer {name!r}. Use another checkpoint."
            )
        return self.file(rank).read(key, 0, tensor.numel).reshape(tensor.shape)

    def verify(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """Checks every byte of every file, and that no tensor is missing.

        Raises:
            CheckpointError: a subclass of it; the message names the file.
        """
        for file in self.files():
            file.verify(progress)
        for name in self.manifest.parameters:
            self.pieces(name)
            break
        else:
            self._all_pieces()


def latest_checkpoint(path: Any, step: int | None = None) -> str | None:
    """Returns the path of the newest complete checkpoint in the folder ``path``.

    Returns ``None`` if there is none. With ``step``, it is the last save of that step. This checks
    manifests, names and sizes. It does not check every byte; loading does.

    Raises:
        CheckpointError: the newest checkpoint is damaged. Remove its folder to use the one before.
    """
    store, root = open_store(path)
    while True:
        place = folders.find_newest(store, root, step)
        if place is None:
            return None
        # Extend the path of the caller: the path inside the store has no protocol.
        found = join(os.fsdecode(path).rstrip("/") or "/", place.name)
        try:
            checkpoint = ShardedCheckpoint(found)
            for record in checkpoint.manifest.files:
                CheckedFile(store, join(checkpoint.folder, record.name), record)
            return found
        except CheckpointError:
            if folders.find_newest(store, root, step) == place:
                raise


class RankFile(CheckedFile):
    """The file of one rank. Opening it checks that it belongs to the manifest.

    Attributes:
        begins: for each parameter, the index of the first element that the rank stores.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        rank: int,
        cache: ChunkCache | None = None,
    ):
        path = join(folder, file_name(rank, manifest.world_size))
        super().__init__(store, path, manifest.files[rank], cache)
        identity = manifest.identity(rank)
        for key, expected in identity.items():
            found = self.container.metadata.get(key)
            if found != expected:
                raise MixedSaveError(
                    f"{self.path}: its header has {key} {found!r:.60}, but the manifest in the "
                    f"same folder has {key} {expected!r}. The file belongs to another save."
                )
        self.begins: dict[str, int] = self._read_begins(manifest)
        for key, entry in self.container.entries.items():
            kind, _, rest = key.partition("/")
            if kind == "parameter":
                tensor = manifest.parameters.get(rest)
                self._require(key, entry, tensor, None if tensor is None else tensor.dtype)
            elif kind == "state":
                state, _, name = rest.partition("/")
                dtype = self._dtype(manifest, name, state)
                self._require(key, entry, manifest.parameters.get(name), dtype)
            elif kind == "buffer":
                self._require_buffer(key, entry, manifest.buffers.get(rest))
            elif kind != "rank":
                raise InvalidMetadataError(
                    f"{self.path}: has {key!r:.120}, expected parameter/, state/, buffer/ or rank/"
                )

    def has(self, key: str) -> bool:
        """Whether the file has a tensor ``key``."""
        return key in self.container.entries

    def length(self, name: str) -> int:
        """Number of elements of a parameter that the rank stores."""
        entry = self.container.entries.get(parameter_key(name))
        return 0 if entry is None else entry.numel

    def _read_begins(self, manifest: Manifest) -> dict[str, int]:
        begins = read_json(self.container.metadata.get("begins", "").encode(), self.path)
        if not isinstance(begins, dict) or not all(
            type(n) is int and n >= 0 and name in manifest.parameters for name, n in begins.items()
        ):
            raise InvalidMetadataError(
                f"{self.path}: its header has no valid 'begins', the first element of each piece"
            )
        return begins

    def _dtype(self, manifest: Manifest, name: str, state: str) -> str | None:
        if manifest.optimizer is None or name not in manifest.optimizer.state:
            return None
        return manifest.optimizer.state[name].sharded.get(state)

    def _require(self, key: str, entry: Entry, tensor: Tensor | None, dtype: str | None) -> None:
        if tensor is None or dtype is None:
            raise ShardMismatchError(f"{self.path}: has {key!r:.120}, unknown to the manifest")
        if entry.dtype != dtype:
            raise ShardMismatchError(
                f"{self.path}: {key!r:.120} is {entry.dtype}, but the manifest says {dtype}"
            )
        begin, length = self.begins.get(tensor.name, 0), self.length(tensor.name)
        if len(entry.shape) != 1 or entry.numel != length or begin + length > tensor.numel:
            raise CoverageError(
                f"{self.path}: {key!r:.120} has shape {list(entry.shape)} from element {begin}, "
                f"which does not fit into a tensor of shape {list(tensor.shape)}"
            )

    def _require_buffer(self, key: str, entry: Entry, tensor: Tensor | None) -> None:
        if tensor is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            expected = "no such buffer"
            if tensor is not None:
                expected = f"{tensor.dtype} {list(tensor.shape)}"
            raise ShardMismatchError(
                f"{self.path}: {key!r:.120} is {entry.dtype} {list(entry.shape)}, but "
                f"the manifest says {expected}"
            )
