"""Writes the file of one rank, tensor by tensor, and reads parts of it with checks of digests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch

from ..errors import CorruptFileError, ShardMismatchError
from .container import Container, dump_header, read_container
from .digests import DIGEST_LENGTH, ChunkDigests, chunk_bytes, digest
from .dtypes import DTYPES, copy_into, dtype_name, tensor_bytes
from .store import Store, creating

PIECE_BYTES = 1 << 22
# Minimum and maximum size of the cache.
_CACHED_BYTES, _MOST_CACHED_BYTES = 1 << 25, 1 << 29


@dataclass(frozen=True)
class FileRecord:
    """One of ``files`` in the manifest. ``digests``: those of all chunks, joined."""

    name: str
    size: int
    chunk: int
    digests: str

    def digest_of(self, number: int) -> str:
        return self.digests[number * DIGEST_LENGTH : (number + 1) * DIGEST_LENGTH]


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written.

    Attributes:
        read: ``read(begin, end)`` returns the flattened elements ``begin .. end``, contiguous on
            the CPU. It is called when they are written.
        origin: the dtype that ``read`` returns, None if the tensor is not cast.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    origin: torch.dtype | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        origin = self.origin or self.dtype
        step = PIECE_BYTES // max(self.dtype.itemsize, origin.itemsize)
        for begin in range(0, self.numel, step):
            end = min(begin + step, self.numel)
            piece = self.read(begin, end)
            if (piece.dtype, piece.numel()) != (origin, end - begin):
                raise ShardMismatchError(
                    f"{self.name!r:.120} has {piece.numel()} elements of {piece.dtype} from "
                    f"{begin}, expected {end - begin} of {origin}: it changed during the save. Do "
                    "not change the model while it is saved."
                )
            if origin is not self.dtype:
                piece = copy_into(torch.empty(len(piece), dtype=self.dtype, device="cpu"), piece)
            yield tensor_bytes(piece)


def pieces(tensors: Iterable[FileTensor]) -> Iterator[memoryview]:
    return (piece for tensor in tensors for piece in tensor.pieces())


def in_file_order(tensors: Iterable[FileTensor]) -> list[FileTensor]:
    """The largest dtypes first, so that each tensor is aligned to its item size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def make_header(tensors: Iterable[FileTensor], metadata: Mapping[str, str]) -> bytes:
    described = ((t.name, dtype_name(t.dtype, repr(t.name)), t.shape) for t in tensors)
    return dump_header(described, metadata)


def write_file(
    store: Store, path: str, tensors: Iterable[FileTensor], metadata: Mapping[str, str]
) -> FileRecord:
    """Writes a safetensors file, durable when this returns. Memory: one tensor at a time.

    Raises OutputError (the caller must remove the incomplete file), or ShardMismatchError if a
    tensor changed its dtype or size during the save.
    """
    ordered = in_file_order(tensors)
    header = make_header(ordered, metadata)
    size = len(header) + sum(tensor.nbytes for tensor in ordered)
    digests = ChunkDigests(chunk_bytes(size))
    with creating(store, path) as output:
        for piece in chain([memoryview(header)], pieces(ordered)):
            digests.update(piece)
            output.write(piece)
    return FileRecord(path.rpartition("/")[2], size, digests.chunk, digests.finish())


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
        if digest(out) != self.record.digest_of(number):
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
        out = torch.empty(
            end - begin, dtype=DTYPES[self.container.entries[key].dtype], device="cpu"
        )
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
        for number in range(math.ceil(self.record.size / self.record.chunk)):
            length = self._chunks.length(number)
            self._chunks.read(number, buffer[:length])
            progress(length)
