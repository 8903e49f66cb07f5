"""The file of one rank, opened: known to belong to the manifest beside it, and to fit it."""

from __future__ import annotations

from ..errors import CoverageError, InvalidMetadataError, MixedSaveError, ShardMismatchError
from .container import Entry
from .manifest import Manifest, Tensor, file_name, parameter_key
from .rank_file import CheckedFile, ChunkCache
from .store import Store, join
from .strict import read_json


class RankFile(CheckedFile):
    """The file of one rank, known to belong to the manifest.

    Attributes:
        begins: by parameter, the first of its elements that the rank holds.
    """

    def __init__(
        self, store: Store, folder: str, whole: Manifest, rank: int, cache: ChunkCache | None = None
    ):
        path = join(folder, file_name(rank, whole.world_size))
        super().__init__(store, path, whole.files[rank], cache)
        identity = whole.identity(rank)
        for key, expected in identity.items():
            found = self.container.metadata.get(key)
            if found != expected:
                raise MixedSaveError(
                    f"{self.path}: says it is of {key} {found!r:.60}, the manifest beside it is of "
                    f"{key} {expected!r}"
                )
        self.begins: dict[str, int] = self._read_begins(whole)
        for key, entry in self.container.entries.items():
            kind, _, rest = key.partition("/")
            if kind == "parameter":
                tensor = whole.parameters.get(rest)
                self._require(key, entry, tensor, None if tensor is None else tensor.dtype)
            elif kind == "state":
                state, _, name = rest.partition("/")
                dtype = self._dtype(whole, name, state)
                self._require(key, entry, whole.parameters.get(name), dtype)
            elif kind == "buffer":
                self._require_buffer(key, entry, whole.buffers.get(rest))
            elif kind != "rank":
                raise InvalidMetadataError(f"{self.path}: holds {key!r:.120}, of no known kind")

    def has(self, key: str) -> bool:
        """Whether there is a tensor ``key``."""
        return key in self.container.entries

    def length(self, name: str) -> int:
        """How many elements of a parameter the rank holds."""
        entry = self.container.entries.get(parameter_key(name))
        return 0 if entry is None else entry.numel

    def _read_begins(self, whole: Manifest) -> dict[str, int]:
        begins = read_json(self.container.metadata.get("begins", "").encode(), self.path)
        if not isinstance(begins, dict) or not all(
            type(n) is int and n >= 0 and name in whole.parameters for name, n in begins.items()
        ):
            raise InvalidMetadataError(f"{self.path}: does not say where its pieces begin")
        return begins

    def _dtype(self, whole: Manifest, name: str, state: str) -> str | None:
        if whole.optimizer is None or name not in whole.optimizer.state:
            return None
        return whole.optimizer.state[name].sharded.get(state)

    def _require(self, key: str, entry: Entry, tensor: Tensor | None, dtype: str | None) -> None:
        if tensor is None or dtype is None:
            raise ShardMismatchError(f"{self.path}: holds {key!r:.120}, unknown to the manifest")
        if entry.dtype != dtype:
            raise ShardMismatchError(
                f"{self.path}: {key!r:.120} is {entry.dtype}, the manifest says {dtype}"
            )
        begin, length = self.begins.get(tensor.name, 0), self.length(tensor.name)
        if len(entry.shape) != 1 or entry.numel != length or begin + length > tensor.numel:
            raise CoverageError(
                f"{self.path}: {key!r:.120} of shape {list(entry.shape)} from element {begin} does "
                f"not fit into {list(tensor.shape)}"
            )

    def _require_buffer(self, key: str, entry: Entry, tensor: Tensor | None) -> None:
        if tensor is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            expected = "nothing of it" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ShardMismatchError(
                f"{self.path}: {key!r:.120} is {entry.dtype} {list(entry.shape)}, "
                f"the manifest says {expected}"
            )
