"""Reads any range of any tensor of a checkpoint, from the files of all ranks, and checks it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
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
from . import folders
from .dtypes import DTYPES
from .manifest import (
    MAX_BYTES,
    NAME,
    Manifest,
    buffer_key,
    file_name,
    is_begun,
    load_manifest,
    parameter_key,
    state_key,
)
from .rank_file import CheckedFile, LoadChunk, cached_loader
from .store import Store, join, open_store, read
from .strict import read_json

_RANK_FILE = re.compile(r"rank-\d+-of-\d+\..*")
# begin, end, rank
Piece = tuple[int, int, int]


class ShardedCheckpoint:
    """One checkpoint, read-only. Opening it reads the manifest and the names in the folder.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no checkpoint at the path.
        CorruptFileError, InvalidMetadataError: the manifest is damaged.
        MissingRankError, MixedSaveError: a file is missing, or is of another save.
    """

    def __init__(self, path: Any, store: Store | None = None, manifest: Manifest | None = None):
        """With ``store``, ``path`` is the folder of a checkpoint in it; ``manifest`` is its own."""
        found: tuple[Store, str] = (
            folders.resolve_checkpoint(path) if store is None else (store, path)
        )
        self.store, self.folder = found
        self.manifest = manifest or _read_manifest(self.store, self.folder)
        self._files: dict[int, RankFile] = {}
        self._load = cached_loader(self.manifest.files)
        self._pieces: dict[str, list[Piece]] | None = None
        place = folders.parse_folder_name(self.folder.rpartition("/")[2])
        if place is not None and place.step != self.manifest.step:
            raise MixedSaveError(
                f"{join(self.folder, NAME)}: is of step {self.manifest.step}, but its folder is "
                f"named after step {place.step}. The folder was renamed, or files were exchanged."
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
        if rank not in self._files:
            self._files[rank] = RankFile(self.store, self.folder, self.manifest, rank, self._load)
        return self._files[rank]

    def files(self) -> Iterator[RankFile]:
        return (self.file(rank) for rank in range(self.manifest.world_size))

    def pieces(self, name: str) -> list[Piece]:
        """The pieces of a parameter in order. Raises as :meth:`require_coverage`."""
        self.require_coverage()
        assert self._pieces is not None
        return self._pieces[name]

    def require_coverage(self) -> None:
        """Opens all files. Raises CoverageError unless they have every element exactly once."""
        if self._pieces is not None:
            return
        pieces: dict[str, list[Piece]] = {name: [] for name in self.manifest.parameters}
        for rank, file in enumerate(self.files()):
            for name in self.manifest.parameters:
                begin, end = file.range_of(name)
                if begin < end:
                    pieces[name].append((begin, end, rank))
        for name, tensor in self.manifest.parameters.items():
            pieces[name].sort()
            last = 0
            for begin, end, rank in pieces[name]:
                if begin != last:
                    what = "no rank has" if begin > last else "two ranks have"
                    raise CoverageError(
                        f"{self.file(rank).path}: {what} elements {min(begin, last)} to "
                        f"{max(begin, last)} of parameter {name!r}. Use another checkpoint."
                    )
                last = end
            if last != tensor.numel:
                raise CoverageError(
                    f"{self.folder}: no rank has elements {last} to {tensor.numel} of parameter "
                    f"{name!r}. Use another checkpoint."
                )
        self._pieces = pieces

    def _pieces_in(self, name: str, begin: int, end: int) -> Iterator[Piece]:
        """The pieces that overlap a range; without rules, all pieces."""
        if self.manifest.sharding_rules is None:
            yield from self.pieces(name)
            return
        rule, numel = self.manifest.sharding_rules[name], self.manifest.parameters[name].numel
        for low, high, rank in rule.pieces(numel, begin, end):
            if rank >= self.manifest.world_size:
                raise CoverageError(
                    f"{join(self.folder, NAME)}: says that rank {rank} has elements {low} to "
                    f"{high} of {name!r}, but there are {self.manifest.world_size} ranks. Use "
                    "another checkpoint."
                )
            yield low, high, rank

    def read(self, name: str, begin: int, end: int, state: str | None = None) -> torch.Tensor:
        """Reads flattened elements of a parameter, or of its optimizer ``state``."""
        tensor, optimizer = self.manifest.parameters[name], self.manifest.optimizer
        if not 0 <= begin <= end <= tensor.numel:
            raise ValueError(
                f"{name!r} has {tensor.numel} elements, so {begin} to {end} is not a range"
            )
        dtype = tensor.dtype
        if state is not None:
            if optimizer is None:
                raise ValueError(f"{self.folder}: has no optimizer, so it has no state {state!r}")
            dtype = optimizer.state[name].sharded[state]
        out = torch.empty(end - begin, dtype=DTYPES[dtype], device="cpu")
        self.read_to(name, state, out, begin)
        return out

    def read_to(self, name: str, state: str | None, out: torch.Tensor, begin: int) -> None:
        """As :meth:`read`, into ``out`` (contiguous, one-dimensional)."""
        key = parameter_key(name) if state is None else state_key(state, name)
        end = begin + out.numel()
        for low, high, rank in self._pieces_in(name, begin, end):
            start, stop = max(low, begin), min(high, end)
            if start < stop:
                self.file(rank).read_to(out[start - begin : stop - begin], key, start - low)

    def read_buffer(self, name: str, begin: int, end: int, rank: int = 0) -> torch.Tensor:
        """Elements of a buffer with the values of ``rank``, or of rank 0 if there was none."""
        rank = rank if rank < self.manifest.world_size else 0
        return self.file(rank).read(buffer_key(name), begin, end)

    def verify(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Checks every byte, and that no tensor is missing. Raises CheckpointError."""
        for file in self.files():
            file.verify(progress)
        self.require_coverage()


def _read_manifest(store: Store, folder: str) -> Manifest:
    label = join(folder, NAME)
    size = store.size(label)
    if size > MAX_BYTES:
        raise CorruptFileError(
            f"{label}: has {size} bytes, a manifest has at most {MAX_BYTES}. Use another "
            "checkpoint."
        )
    if not is_begun(store, label):
        raise CorruptFileError(f"{label}: is not a manifest. Use another checkpoint.")
    return load_manifest(read(store, label, 0, size), label)


def latest_checkpoint(path: Any, step: int | None = None) -> str | None:
    """Returns the path of the newest complete checkpoint in the folder ``path``, ``None`` if none.

    With ``step``, it is the last save of that step. This checks manifests, names and sizes; loading
    checks every byte.

    Raises:
        CheckpointError: the newest checkpoint is damaged. Remove its folder to use the one before.
    """
    store, root = open_store(path)
    while True:
        place = folders.find_newest(store, root, step)
        if place is None:
            return None
        # The path inside the store has no protocol.
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
    """The file of one rank. Opening it checks that it matches the manifest."""

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        rank: int,
        load: LoadChunk | None = None,
    ):
        path = join(folder, file_name(rank, manifest.world_size))
        super().__init__(store, path, manifest.files[rank], load)
        self._manifest = manifest
        for key, expected in manifest.identity(rank).items():
            found = self.container.metadata.get(key)
            if found != expected:
                raise MixedSaveError(
                    f"{self.path}: its header has {key} {found!r:.60}, but the manifest in the "
                    f"same folder has {key} {expected!r}. The file belongs to another save."
                )
        begins = read_json(self.container.metadata.get("begins", "").encode(), path)
        if not isinstance(begins, dict) or not all(
            type(n) is int and n >= 0 and name in manifest.parameters for name, n in begins.items()
        ):
            raise InvalidMetadataError(
                f"{path}: its header has no valid 'begins', the first element of each piece"
            )
        self._begins: dict[str, int] = begins
        self._require_entries()
        for name, rule in (manifest.sharding_rules or {}).items():
            stated = rule.range_of_rank(rank, manifest.parameters[name].numel)
            if stated != self.range_of(name):
                raise CoverageError(
                    f"{self.path}: has elements {self.range_of(name)} of {name!r}, but the "
                    f"manifest says {stated}. Use another checkpoint."
                )

    def range_of(self, name: str) -> tuple[int, int]:
        """The range of elements that the rank stores, ``(0, 0)`` if none."""
        begin, entry = self._begins.get(name, 0), self.container.entries.get(parameter_key(name))
        return (begin, begin + entry.numel) if entry is not None and entry.numel else (0, 0)

    def _require_entries(self) -> None:
        optimizer, entries = self._manifest.optimizer, self.container.entries
        expected, needed = dict[str, tuple[str, tuple[int, ...]]](), list[str]()
        for name, tensor in self._manifest.buffers.items():
            expected[buffer_key(name)] = tensor.dtype, tensor.shape
            needed.append(buffer_key(name))
        for name, tensor in self._manifest.parameters.items():
            begin, end = self.range_of(name)
            if end > tensor.numel:
                raise CoverageError(
                    f"{self.path}: has elements {begin} to {end} of {name!r:.120}, which has only "
                    f"{tensor.numel} according to the manifest"
                )
            state = optimizer.state.get(name) if optimizer is not None else None
            dtypes = {} if state is None else state.sharded
            keys = {parameter_key(name): tensor.dtype}
            keys |= {state_key(key, name): dtype for key, dtype in dtypes.items()}
            expected |= {key: (dtype, (end - begin,)) for key, dtype in keys.items()}
            needed += keys if begin < end else ()
        for key, entry in entries.items():
            kind = key.partition("/")[0]
            if kind == "rank":
                continue
            if kind not in ("parameter", "state", "buffer"):
                raise InvalidMetadataError(
                    f"{self.path}: has {key!r:.120}, expected parameter/, state/, buffer/ or rank/"
                )
            if key not in expected:
                raise ShardMismatchError(f"{self.path}: has {key!r:.120}, unknown to the manifest")
            dtype, shape = expected[key]
            if (entry.dtype, entry.shape) != (dtype, shape):
                other_piece = kind != "buffer" and entry.dtype == dtype
                error = CoverageError if other_piece else ShardMismatchError
                raise error(
                    f"{self.path}: {key!r:.120} is {entry.dtype} {list(entry.shape)}, but the "
                    f"manifest and the other tensors of the file say {dtype} {list(shape)}"
                )
        for key in needed:
            if key not in entries:
                error = ShardMismatchError if key.startswith("buffer/") else CoverageError
                raise error(f"{self.path}: lacks {key!r:.120}. Use another checkpoint.")
