"""One rank's file: writing it tensor by tensor, and reading parts of it, every byte checked."""

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

# Bytes written or copied to the host at a time.
PIECE_BYTES = 1 << 24
# Of chunks that were read for a part of them, kept in case the next read wants more.
CACHED_BYTES = 1 << 25
# The same of a checkpoint of many files.
MOST_CACHED_BYTES = 1 << 29


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of a file. chunk: bytes that one of ``digests`` is of."""

    name: str
    size: int
    chunk: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A tensor to be written. value: gives it, one-dimensional or of ``shape``, when it is its
    turn; called once."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    value: Callable[[], torch.Tensor]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


class Sized(Protocol):
    """A tensor to be written, however it is described."""

    @property
    def itemsize(self) -> int: ...


def write_file(
    store: Store, path: str, items: Iterable[Item], metadata: Mapping[str, str]
) -> FileRecord:
    """Writes a safetensors file; durable when this returns. Memory: one tensor at a time.

    Raises:
        OutputError: it cannot be written. What is there of it is left to the caller.
    """
    items = widest_first(items)

    def feed(take: Callable[[memoryview], None]) -> None:
        for item in items:
            value = item.value().detach().cpu().reshape(-1)
            if (value.dtype, value.numel()) != (DTYPES[item.dtype], math.prod(item.shape)):
                raise ShardMismatchError(
                    f"{path}: {item.key!r:.120} is {value.dtype} of {value.numel()} elements, "
                    f"expected {item.dtype} {list(item.shape)}: it changed during the save"
                )
            view = tensor_bytes(value)
            for begin in range(0, len(view), PIECE_BYTES):
                take(view[begin : begin + PIECE_BYTES])
            del value, view

    return write_pieces(store, path, [(i.key, i.dtype, i.shape) for i in items], metadata, feed)


T = TypeVar("T", bound=Sized)


def widest_first(tensors: Iterable[T]) -> list[T]:
    """In an order in which every tensor of the file begins at a multiple of its own item size."""
    return sorted(tensors, key=lambda tensor: -tensor.itemsize)


def write_pieces(
    store: Store,
    path: str,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    feed: Callable[[Callable[[memoryview], None]], None],
) -> FileRecord:
    """The file of ``tensors`` (name, dtype, shape), the bytes of which ``feed`` hands, in order, to
    the function that it is given. Durable when this returns; errors as :func:`write_file`."""
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
    """Chunks of some files, the least recently used ones forgotten; at least one is kept.

    Threads may share one.
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
    """A file whose bytes are compared with the digests of its record as they are read.

    ``cache`` may be shared by several files, so that many of them take no more than one.

    Raises:
        CorruptFileError: size or bytes are not those of the record.
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
            kind = "truncated" if size < record.size else "something was appended"
            raise CorruptFileError(
                f"{path}: has {size} bytes, the manifest says {record.size}: {kind}; "
                "use another checkpoint"
            )

    @property
    def container(self) -> Container:
        """Its header; read when first asked for."""
        if self._container is None:
            self._container = read_container(self._bytes, self.record.size, self.path)
        return self._container

    def read_into(self, begin: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``begin``, having checked the chunks they are in."""
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
        """Elements ``begin .. end`` of a tensor, one-dimensional; in ``out``, if it is given."""
        if out is None:
            out = torch.empty(end - begin, dtype=DTYPES[self.container.entries[key].dtype])
        self.read_to(out, key, begin)
        return out

    def read_to(self, out: torch.Tensor, key: str, begin: int) -> None:
        """The same from ``begin`` on into ``out``, contiguous, one-dimensional and of its dtype."""
        entry = self.container.entries[key]
        assert out.dtype is DTYPES[entry.dtype] and begin + out.numel() <= entry.numel, key
        if out.numel():
            self.read_into(entry.begin + begin * entry.itemsize, tensor_bytes(out))

    def verify(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """Checks every byte. ``progress`` is told how many at a time."""
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
                "saved (their digest differs from the manifest's); use another checkpoint"
            )
