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

_PIECE_BYTES = 1 << 24
# Minimum and maximum size of the cache.
_CACHED_BYTES, _MOST_CACHED_BYTES = 1 << 25, 1 << 29


@dataclass(frozen=True)
class FileRecord:
    name: str
    size: int
    chunk: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A tensor to be written. ``value`` is called once, when it is written."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    value: Callable[[], torch.Tensor]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


def widest_first(tensors: Iterable[Any]) -> list[Any]:
    """Sorts tensors by ``itemsize``, largest first, so that each is aligned to its item size."""
    return sorted(tensors, key=lambda tensor: -tensor.itemsize)


def write_file(
    store: Store, path: str, items: Iterable[Item], metadata: Mapping[str, str]
) -> FileRecord:
    """Writes a safetensors file, durable when this returns. Memory: one tensor at a time.

    Raises OutputError (the caller must remove the incomplete file), or ShardMismatchError if a
    tensor changed its dtype or size during the save.
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
    """Apart from `CheckedFile`, because a cache refers to it."""

    store: Store
    path: str
    record: FileRecord

    def length(self, number: int) -> int:
        return min(self.record.chunk, self.record.size - number * self.record.chunk)

    def read(self, number: int, out: memoryview) -> None:
        begin = number * self.record.chunk
        self.store.read_into(self.path, begin, out)
        if digest(out) != self.record.digests[number]:
            raise CorruptFileError(
                f"{self.path}: bytes {begin} to {begin + len(out)} are not those that were "
                "saved (their digest differs from the manifest). Use another checkpoint."
            )

    def load(self, number: int) -> bytearray:
        data = bytearray(self.length(number))
        self.read(number, memoryview(data))
        return data


LoadChunk = Callable[[_Chunks, int], bytearray]


def cached_loader(records: Iterable[FileRecord]) -> LoadChunk:
    """A loader for several files, with a cache that has room for a chunk of each, within limits."""
    records = list(records)
    chunk = max((min(record.chunk, record.size) for record in records), default=1) or 1
    count = min(max(len(records), _CACHED_BYTES // chunk), _MOST_CACHED_BYTES // chunk)
    return lru_cache(max(count, 1))(_Chunks.load)


class CheckedFile:
    """A file whose bytes are compared with the digests of its record when they are read.

    Files that share ``load`` share its memory limit. Raises CorruptFileError.
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
        def read(begin: int, end: int) -> bytes:
            data = bytearray(end - begin)
            self.read_into(begin, memoryview(data))
            return bytes(data)

        return read_container(read, self.record.size, self.path)

    def read_into(self, begin: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``begin``, after a check of their chunks."""
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
        out = torch.empty(end - begin, dtype=DTYPES[self.container.entries[key].dtype])
        self.read_to(out, key, begin)
        return out

    def read_to(self, out: torch.Tensor, key: str, begin: int) -> None:
        """Fills ``out`` (contiguous, one-dimensional, same dtype) from element ``begin``."""
        entry = self.container.entries[key]
        assert out.dtype is DTYPES[entry.dtype] and begin + out.numel() <= entry.numel, key
        if out.numel():
            self.read_into(entry.begin + begin * entry.itemsize, tensor_bytes(out))

    def verify(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Checks every byte. ``progress`` receives the number of bytes of each step."""
        buffer = memoryview(bytearray(min(self.record.chunk, self.record.size)))
        for number in range(len(self.record.digests)):
            length = self._chunks.length(number)
            self._chunks.read(number, buffer[:length])
            progress(length)
