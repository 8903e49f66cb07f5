"""Writes the file of one rank, tensor by tensor, and reads parts of it with checks of digests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..errors import CorruptFileError, ShardMismatchError
from .container import Container, layout, read_container
from .digests import ChunkDigests, chunk_bytes, digest
from .dtypes import DTYPES, flatten_on_host, tensor_bytes
from .store import Store, creating

# Bytes that are written at a time.
_PIECE_BYTES = 1 << 24
# Size of the cache of chunks that were read for a part of them: at least, and for many files.
_CACHED_BYTES, _MOST_CACHED_BYTES = 1 << 25, 1 << 29


@dataclass(frozen=True)
class FileRecord:
    """The description of a file in the manifest. ``chunk``: number of bytes for each digest."""

    name: str
    size: int
    chunk: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A tensor to be written.

    Attributes:
        value: returns the tensor, one-dimensional or with ``shape``. It is called once, when the
            tensor is written.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    value: Callable[[], torch.Tensor]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


def widest_first(tensors: Iterable[Any]) -> list[Any]:
    """Sorts tensors by ``itemsize``, largest first: each begins at a multiple of its item size."""
    return sorted(tensors, key=lambda tensor: -tensor.itemsize)


def write_file(
    store: Store, path: str, items: Iterable[Item], metadata: Mapping[str, str]
) -> FileRecord:
    """Writes a safetensors file, durable when this returns. Memory: one tensor at a time.

    Raises:
        OutputError: the file cannot be written. The caller must remove the incomplete file.
        ShardMismatchError: a tensor changed its dtype or size during the save.
    """
    items = widest_first(items)
    container, header = layout([(i.key, i.dtype, i.shape) for i in items], metadata)
    digests = ChunkDigests(chunk_bytes(container.size))
    with creating(store, path) as output:
        for piece in _pieces(path, header, items):
            digests.update(piece)
            output.write(piece)
    name = path.rpartition("/")[2]
    return FileRecord(name, container.size, digests.chunk, tuple(digests.finish()))


def _pieces(path: str, header: bytes, items: Iterable[Item]) -> Iterator[memoryview]:
    """The bytes of a file: the header, and the values of ``items``."""
    yield memoryview(header)
    for item in items:
        value = flatten_on_host(item.value())
        if (value.dtype, value.numel()) != (DTYPES[item.dtype], math.prod(item.shape)):
            raise ShardMismatchError(
                f"{path}: {item.key!r:.120} is {value.dtype} with {value.numel()} elements, "
                f"expected {item.dtype} {list(item.shape)}: it changed during the save. Do not "
                "change the model while it is saved."
            )
        view = tensor_bytes(value)
        for begin in range(0, len(view), _PIECE_BYTES):
            yield view[begin : begin + _PIECE_BYTES]
        del value, view


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Reads chunks of a file. It is apart from `CheckedFile`, because a cache refers to it."""

    store: Store
    path: str
    record: FileRecord

    def length(self, number: int) -> int:
        """The number of bytes of a chunk."""
        return min(self.record.chunk, self.record.size - number * self.record.chunk)

    def read(self, number: int, out: memoryview) -> None:
        """Fills ``out`` with a chunk, and checks its digest."""
        begin = number * self.record.chunk
        self.store.read_into(self.path, begin, out)
        if digest(out) != self.record.digests[number]:
            raise CorruptFileError(
                f"{self.path}: bytes {begin} to {begin + len(out)} are not those that were "
                "saved (their digest differs from the manifest). Use another checkpoint."
            )

    def load(self, number: int) -> bytearray:
        """Reads a chunk, and checks its digest."""
        data = bytearray(self.length(number))
        self.read(number, memoryview(data))
        return data


# Returns the bytes of a chunk of a file, after a check of its digest.
LoadChunk = Callable[[_Chunks, int], bytearray]


def cached_loader(records: Iterable[FileRecord]) -> LoadChunk:
    """Makes a function that loads chunks of several files, with a cache of limited size.

    The cache has room for one chunk of each file, within limits. A smaller one would read a chunk
    again for each tensor in it, when tensors are read one after the other. It is freed with the
    last file that uses it, without the garbage collector: the files that it caches do not refer
    to it.
    """
    records = list(records)
    chunk = max((min(record.chunk, record.size) for record in records), default=1) or 1
    count = min(max(len(records), _CACHED_BYTES // chunk), _MOST_CACHED_BYTES // chunk)
    return lru_cache(max(count, 1))(_Chunks.load)


class CheckedFile:
    """A file whose bytes are compared with the digests of its record when they are read.

    Several files may share ``load``, which then limits their total memory.

    Raises:
        CorruptFileError: the size or the bytes differ from the record.
    """

    def __init__(self, store: Store, path: str, record: FileRecord, load: LoadChunk | None = None):
        self.store = store
        self.path = path
        self.record = record
        self._chunks = _Chunks(store, path, record)
        self._load = load or cached_loader([record])
        size = store.size(path)
        if size != record.size:
            kind = "it is truncated" if size < record.size else "bytes were appended"
            raise CorruptFileError(
                f"{path}: has {size} bytes, but the manifest says {record.size}: {kind}. "
                "Use another checkpoint."
            )

    @cached_property
    def container(self) -> Container:
        """The header of the file."""

        def read(begin: int, end: int) -> bytes:
            data = bytearray(end - begin)
            self.read_into(begin, memoryview(data))
            return bytes(data)

        return read_container(read, self.record.size, self.path)

    def read_into(self, begin: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``begin``, after a check of the chunks they are in."""
        done = 0
        while done < len(out):
            number, inside = divmod(begin + done, self.record.chunk)
            length = self._chunks.length(number)
            if inside == 0 and len(out) - done >= length:
                self._chunks.read(number, out[done : done + length])
                done += length
            else:
                part = memoryview(self._load(self._chunks, number))
                part = part[inside : inside + len(out) - done]
                out[done : done + len(part)] = part
                done += len(part)

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Reads the elements ``begin .. end`` of a flattened tensor."""
        out = torch.empty(end - begin, dtype=DTYPES[self.container.entries[key].dtype])
        self.read_to(out, key, begin)
        return out

    def read_to(self, out: torch.Tensor, key: str, begin: int) -> None:
        """Fills ``out`` with the elements of a tensor from ``begin``.

        ``out`` must be contiguous and one-dimensional, with the dtype of the tensor.
        """
        entry = self.container.entries[key]
        assert out.dtype is DTYPES[entry.dtype] and begin + out.numel() <= entry.numel, key
        if out.numel():
            self.read_into(entry.begin + begin * entry.itemsize, tensor_bytes(out))

    def verify(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Checks every byte. ``progress`` is called with the number of bytes of each step."""
        buffer = memoryview(bytearray(min(self.record.chunk, self.record.size)))
        for number in range(len(self.record.digests)):
            length = self._chunks.length(number)
            self._chunks.read(number, buffer[:length])
            progress(length)
