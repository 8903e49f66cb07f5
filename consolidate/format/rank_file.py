"""Writes the file of one rank, tensor by tensor, and reads parts of it with checks of digests."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ..errors import CorruptFileError, ShardMismatchError
from .container import Container, layout, read_container
from .digests import ChunkDigests, chunk_bytes, digest
from .dtypes import DTYPES, tensor_bytes
from .store import Store

# Bytes that are written at a time.
PIECE_BYTES = 1 << 24
# Default size of the cache of chunks that were read for a part of them.
CACHED_BYTES = 1 << 25
# Maximum size of that cache for a checkpoint with many files.
MOST_CACHED_BYTES = 1 << 29


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


class Sized(Protocol):
    """A tensor to be written, of which only the item size matters."""

    @property
    def itemsize(self) -> int: ...


def write_file(
    store: Store, path: str, items: Iterable[Item], metadata: Mapping[str, str]
) -> FileRecord:
    """Writes a safetensors file, durable when this returns. Memory: one tensor at a time.

    Raises:
        OutputError: the file cannot be written. The caller must remove the incomplete file.
        ShardMismatchError: a tensor changed its dtype or size during the save.
    """
    items = widest_first(items)

    def feed(take: Callable[[memoryview], None]) -> None:
        for item in items:
            value = item.value().detach().cpu().reshape(-1)
            if (value.dtype, value.numel()) != (DTYPES[item.dtype], math.prod(item.shape)):
                raise ShardMismatchError(
                    f"{path}: {item.key!r:.120} is {value.dtype} with {value.numel()} elements, "
                    f"expected {item.dtype} {list(item.shape)}: it changed during the save. Do not "
                    "change the model while it is saved."
                )
            view = tensor_bytes(value)
            for begin in range(0, len(view), PIECE_BYTES):
                take(view[begin : begin + PIECE_BYTES])
            del value, view

    return write_pieces(store, path, [(i.key, i.dtype, i.shape) for i in items], metadata, feed)


T = TypeVar("T", bound=Sized)


def widest_first(tensors: Iterable[T]) -> list[T]:
    """Sorts tensors by item size, largest first, so that each begins at a multiple of its size."""
    return sorted(tensors, key=lambda tensor: -tensor.itemsize)


def write_pieces(
    store: Store,
    path: str,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    feed: Callable[[Callable[[memoryview], None]], None],
) -> FileRecord:
    """Writes a file of ``tensors`` (name, dtype, shape), durable when this returns.

    ``feed`` is called with a function, to which it must pass all bytes of the tensors in order.
    Raises as :func:`write_file`.
    """
    container, header = layout(tensors, metadata)
    digests = ChunkDigests(chunk_bytes(container.size))
    output = store.create(path)

    def take(piece: memoryview) -> None:
        digests.update(piece)
        output.write(piece)

    try:
        take(memoryview(header))
        feed(take)
        output.close()
    except BaseException:
        output.discard()
        raise
    name = path.rpartition("/")[2]
    return FileRecord(name, container.size, digests.chunk, tuple(digests.finish()))


class ChunkCache:
    """A cache of chunks of files. It evicts the least recently used ones, but keeps at least one.

    Several threads may use one cache.
    """

    def __init__(self, limit: int = CACHED_BYTES):
        self._limit = limit
        self._bytes = 0
        self._chunks: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, number: int) -> bytearray | None:
        with self._lock:
            found = self._chunks.get((path, number))
            if found is not None:
                self._chunks.move_to_end((path, number))
            return found

    def put(self, path: str, number: int, data: bytearray) -> None:
        with self._lock:
            self._bytes += len(data) - len(self._chunks.pop((path, number), b""))
            self._chunks[path, number] = data
            while self._bytes > self._limit and len(self._chunks) > 1:
                self._bytes -= len(self._chunks.popitem(last=False)[1])


class CheckedFile:
    """A file whose bytes are compared with the digests of its record when they are read.

    Several files may share a ``cache``, which then limits their total memory.

    Raises:
        CorruptFileError: the size or the bytes differ from the record.
    """

    def __init__(
        self, store: Store, path: str, record: FileRecord, cache: ChunkCache | None = None
    ):
        self.store = store
        self.path = path
        self.record = record
        self._cache = ChunkCache() if cache is None else cache
        self._container: Container | None = None
        size = store.size(path)
        if size != record.size:
            kind = "it is truncated" if size < record.size else "bytes were appended"
            raise CorruptFileError(
                f"{path}: has {size} bytes, but the manifest says {record.size}: {kind}. "
                "Use another checkpoint."
            )

    @property
    def container(self) -> Container:
        """The header of the file. It is read at the first access."""
        if self._container is None:
            self._container = read_container(self._bytes, self.record.size, self.path)
        return self._container

    def read_into(self, begin: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``begin``, after a check of the chunks they are in."""
        chunk, done = self.record.chunk, 0
        while done < len(out):
            at = begin + done
            number, inside = divmod(at, chunk)
            length = min(chunk, self.record.size - number * chunk)
            cached = self._cache.get(self.path, number)
            if inside == 0 and len(out) - done >= length and cached is None:
                target = out[done : done + length]
                self.store.read_into(self.path, at, target)
                self._check(number, target)
                done += length
            else:
                data = self._load(number, length) if cached is None else cached
                part = memoryview(data)[inside : inside + len(out) - done]
                out[done : done + len(part)] = part
                done += len(part)

    def read(self, key: str, begin: int, end: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Reads the elements ``begin .. end`` of a flattened tensor, into ``out`` if given."""
        if out is None:
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

    def verify(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """Checks every byte. ``progress`` is called with the number of bytes of each step."""
        buffer = memoryview(bytearray(min(self.record.chunk, self.record.size)))
        for number in range(len(self.record.digests)):
            begin = number * self.record.chunk
            part = buffer[: min(self.record.chunk, self.record.size - begin)]
            self.store.read_into(self.path, begin, part)
            self._check(number, part)
            progress(len(part))

    def _bytes(self, begin: int, end: int) -> bytes:
        data = bytearray(end - begin)
        self.read_into(begin, memoryview(data))
        return bytes(data)

    def _load(self, number: int, length: int) -> bytearray:
        data = bytearray(length)
        self.store.read_into(self.path, number * self.record.chunk, memoryview(data))
        self._check(number, memoryview(data))
        self._cache.put(self.path, number, data)
        return data

    def _check(self, number: int, data: memoryview) -> None:
        if digest(data) != self.record.digests[number]:
            begin = number * self.record.chunk
            raise CorruptFileError(
                f"{self.path}: bytes {begin} to {begin + len(data)} are not those that were "
                "saved (their digest differs from the manifest). Use another checkpoint."
            )
