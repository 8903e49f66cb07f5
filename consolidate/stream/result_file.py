"""Writes one file of the result while its tensors are read: a safetensors or a torch file.

The header of a safetensors file is written last, with a ``"digest"`` of all bytes after it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import torch
import xxhash

from ..errors import CheckpointError, UnsupportedValueError
from ..format.digests import ChunkDigests, chunk_bytes, digest
from ..format.dtypes import flatten_on_host, is_dense
from ..format.local import LocalStore
from ..format.rank_file import PIECE_BYTES, FileTensor, in_file_order, make_header, pieces
from ..format.store import creating, read

_DISK = LocalStore()
_ALIGNMENT = 64
_ZIP64_BYTES = 1 << 30
_FOLDER = "consolidated"
_IDENTITY = f"{_FOLDER}/.data/serialization_id"
_FIXED = {
    "version": b"3\n",
    "byteorder": b"little",
    ".format_version": b"1",
    ".storage_alignment": str(_ALIGNMENT).encode(),
}
_UNKNOWN = "0" * 16


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file to be written. ``tensors`` is called each time they are needed."""

    name: str
    tensors: Callable[[], Iterable[FileTensor]]
    metadata: Mapping[str, str]

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @cached_property
    def size(self) -> int:
        return len(self._header(_UNKNOWN)) + self.nbytes

    def write(self, path: str, progress: Callable[[int], object]) -> str:
        """Writes durably. Returns the digests of the file's chunks. Raises OutputError."""
        header, total = self._header(_UNKNOWN), xxhash.xxh3_64()
        chunks = ChunkDigests(chunk_bytes(self.size))
        chunks.update(memoryview(header))
        with creating(_DISK, path) as output:
            output.write(bytes(len(header)))
            for piece in read_ahead(pieces(in_file_order(self.tensors()))):
                total.update(piece)
                chunks.update(piece)
                output.write(piece)
                progress(len(piece))
            output.write_at(0, self._header(total.hexdigest()))
        digests, chunk = chunks.finish(), chunks.chunk
        first = ""
        for begin in range(0, len(header), chunk):
            first += digest(read(_DISK, path, begin, min(begin + chunk, self.size)))
        return first + digests[len(first) :]

    def check(self, path: str, progress: Callable[[int], object]) -> str | None:
        """The digests of its chunks if a file equals this one in every byte, else None."""
        begin, total = len(self._header(_UNKNOWN)), xxhash.xxh3_64()
        chunks = ChunkDigests(chunk_bytes(self.size))
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            if _DISK.size(path) != self.size:
                return None
            header = read(_DISK, path, 0, begin)
            chunks.update(memoryview(header))
            while begin < self.size:
                piece = buffer[: self.size - begin]
                _DISK.read_into(path, begin, piece)
                total.update(piece)
                chunks.update(piece)
                progress(len(piece))
                begin += len(piece)
        except CheckpointError:
            return None
        return chunks.finish() if header == self._header(total.hexdigest()) else None

    def _header(self, digest: str) -> bytes:
        return make_header(in_file_order(self.tensors()), {**self.metadata, "digest": digest})


@dataclass(frozen=True)
class TorchFile:
    """A torch file to be written.

    ``content`` has a ``FileTensor`` for every tensor. One that occurs twice is stored once.
    """

    name: str
    content: Any
    identity: str

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self._records[1].values())

    def write(self, path: str, progress: Callable[[int], object]) -> str:
        small, storages = self._records
        with creating(_DISK, path) as output:
            with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
                for record, data in small.items():
                    with _open_record(archive, record, len(data)) as entry:
                        entry.write(data)
                for record, storage in storages.items():
                    produce = storage.pieces()
                    # For a small one, a thread would cost more time than it saves.
                    if storage.nbytes > PIECE_BYTES:
                        produce = read_ahead(produce)
                    with _open_record(archive, record, storage.nbytes) as entry:
                        for piece in produce:
                            entry.write(piece)
                            progress(len(piece))
        return ""

    def check(self, path: str, progress: Callable[[int], object]) -> str | None:
        """``""`` if a file equals this one in every byte, else None."""
        small, storages = self._records
        sizes = {record: len(data) for record, data in small.items()}
        sizes |= {record: storage.nbytes for record, storage in storages.items()}
        try:
            _DISK.size(path)
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
                if [(e.filename, e.file_size) for e in entries] != list(sizes.items()):
                    return None
                for entry in entries:
                    if entry.compress_type != zipfile.ZIP_STORED:
                        return None
                    with archive.open(entry) as file:  # compares the CRC at the end
                        if entry.filename in small and file.read() != small[entry.filename]:
                            return None
                        while piece := file.read(PIECE_BYTES):
                            progress(len(piece))
        except Exception:
            return None  # zipfile raises many kinds of exceptions
        return ""

    @cached_property
    def _records(self) -> tuple[dict[str, bytes], dict[str, FileTensor]]:
        buffer = io.BytesIO()
        pickler = _StoragePickler(buffer)
        pickler.dump(self.content)
        fixed = {f"{_FOLDER}/{name}": data for name, data in _FIXED.items()}
        small = {f"{_FOLDER}/data.pkl": buffer.getvalue(), **fixed}
        storages = {f"{_FOLDER}/data/{n}": each for n, each in enumerate(pickler.storages)}
        return {**small, _IDENTITY: self.identity.encode()}, storages


ResultFile = SafetensorsFile | TorchFile


class _StoragePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=2)
        self.storages: list[FileTensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return ("storage", value.kind, value.key, "cpu", value.count)

    def reducer_override(self, value: Any) -> Any:
        # Tensors in memory, such as 'step'. Sparse tensors consist of dense ones.
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            value = _constant(value)
        if not isinstance(value, FileTensor):
            return NotImplemented
        dtype, key = value.dtype, str(len(self.storages))
        self.storages.append(value)
        stride = torch.empty(value.shape, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        if dtype in torch.storage._new_dtypes():
            storage = _Storage(torch.UntypedStorage, key, value.nbytes)
            arguments = (storage, 0, value.shape, stride, False, hooks)
            return torch._utils._rebuild_tensor_v3, (*arguments, dtype)
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
        storage = _Storage(kind, key, value.numel)
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, stride, False, hooks)


@dataclass(frozen=True)
class _Storage:
    """``kind``: the class in torch. ``count``: number of elements (bytes if untyped)."""

    kind: type
    key: str
    count: int


def _constant(tensor: torch.Tensor) -> FileTensor:
    if not is_dense(tensor):
        raise UnsupportedValueError(
            f"a tensor of shape {list(tensor.shape)} cannot be written, because it is quantized or "
            "on the meta device. Dequantize it, or give it values."
        )
    flat = flatten_on_host(tensor)
    return FileTensor("", tensor.dtype, tuple(tensor.shape), lambda begin, end: flat[begin:end])


def _open_record(archive: zipfile.ZipFile, record: str, size: int) -> IO[bytes]:
    """Opens a record for writing, with padding so that its data is aligned."""
    entry = zipfile.ZipInfo(record)
    entry.file_size = size
    wide = size >= _ZIP64_BYTES
    # 30 bytes, the name, the padding (4 bytes and zeros), and 20 for 64-bit sizes.
    header = 30 + len(record.encode()) + 4 + (20 if wide else 0)
    padding = -(archive.start_dir + header) % _ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    return archive.open(entry, "w", force_zip64=wide)


def read_ahead(produce: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yields the pieces, while another thread produces the next one."""
    with ThreadPoolExecutor(1, "read ahead") as reader:
        ahead = reader.submit(next, produce, None)
        while (piece := ahead.result()) is not None:
            ahead = reader.submit(next, produce, None)
            yield piece
