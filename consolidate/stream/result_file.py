"""Writes one file of the result while its tensors are read: a safetensors or a torch file.

In a safetensors file, ``__metadata__`` in the header has the metadata of the plan and a
``"digest"``: the xxh3 digest of all bytes after the header. The header is written last, so an
incomplete file has no valid header.

A torch file is a zip file with a pickle and the storages, in the layout of ``torch.save``: without
compression, and storages begin at multiples of 64 bytes, so that ``torch.load(mmap=True)`` can map
them.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch
import xxhash

from ..errors import CheckpointError, UnsupportedValueError
from ..format.container import layout
from ..format.rank_file import widest_first
from .disk import Disk, DiskOutput
from .pump import pump
from .tensors import PIECE_BYTES, ResultTensor, Ring, pieces

_ALIGNMENT = 64
_ZIP64_BYTES = 1 << 30
_FOLDER = "consolidated"
_IDENTITY = f"{_FOLDER}/.data/serialization_id"
_FIXED = {"version": b"3\n", "byteorder": b"little", ".format_version": b"1"}

_UNKNOWN = "0" * 16  # has the length of a digest


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file to be written; see :class:`~.write_plan.WritePlan`."""

    name: str
    tensors: tuple[ResultTensor, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, disk: Disk, path: str, progress: Callable[[int], None]) -> None:
        """Writes the file, durable when this returns. Raises OutputError and errors of reading."""
        digest = xxhash.xxh3_64()
        output = disk.create(path)

        def take(piece: memoryview) -> None:
            digest.update(piece)
            output.write(piece)
            progress(len(piece))

        try:
            output.write(bytes(len(self._header(_UNKNOWN))))
            pump(pieces(widest_first(self.tensors)), take)
            output.write_at(0, self._header(digest.hexdigest()))
            output.close()
        except BaseException:
            output.discard()
            raise

    def finished(self, disk: Disk, path: str, progress: Callable[[int], None]) -> bool:
        """Whether the file at ``path`` is complete and equal to this one. Checks every byte."""
        expected = len(self._header(_UNKNOWN))
        digest = xxhash.xxh3_64()
        try:
            size = disk.size(path)
            if size != expected + self.nbytes:
                return False
            header = bytearray(expected)
            disk.read_into(path, 0, memoryview(header))
            buffer = memoryview(bytearray(PIECE_BYTES))
            for begin in range(expected, size, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, size - begin)]
                disk.read_into(path, begin, piece)
                digest.update(piece)
                progress(len(piece))
        except CheckpointError:
            return False
        return bytes(header) == self._header(digest.hexdigest())

    def _header(self, digest: str) -> bytes:
        described = [tensor.described for tensor in widest_first(self.tensors)]
        return layout(described, {**self.metadata, "digest": digest})[1]


@dataclass(frozen=True)
class TorchFile:
    """A torch file to be written.

    Attributes:
        content: the content, with a ``ResultTensor`` for every tensor. If one occurs under several
            names, the file has one tensor under these names.
        identity: identifies the save and the options.
    """

    name: str
    content: Any
    identity: str

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self._pickled()[1])

    def write(self, disk: Disk, path: str, progress: Callable[[int], None]) -> None:
        """Writes the file, durable when this returns. Raises OutputError and errors of reading."""
        pickled, storages = self._pickled()
        output = disk.create(path)
        try:
            file = _Seekable(output)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for record, data in self._small(pickled).items():
                    with _open(archive, file, record, len(data)) as entry:
                        entry.write(data)
                ring = Ring()
                for number, storage in enumerate(storages):
                    with _open(archive, file, _storage_name(number), storage.nbytes) as entry:
                        _pump(storage, ring, entry, progress)
            output.close()
        except BaseException:
            output.discard()
            raise

    def finished(self, disk: Disk, path: str, progress: Callable[[int], None]) -> bool:
        """Whether the file at ``path`` is complete and equal to this one. Checks every byte."""
        pickled, storages = self._pickled()
        small = self._small(pickled)
        sizes = {record: len(data) for record, data in small.items()}
        sizes |= {_storage_name(n): storage.nbytes for n, storage in enumerate(storages)}
        try:
            disk.size(path)
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
                if [(e.filename, e.file_size) for e in entries] != list(sizes.items()):
                    return False
                for entry in entries:
                    if entry.compress_type != zipfile.ZIP_STORED:
                        return False
                    with archive.open(entry) as file:  # compares the CRC at the end
                        if entry.filename in small:
                            if file.read() != small[entry.filename]:
                                return False
                        while piece := file.read(PIECE_BYTES):
                            progress(len(piece))
        except (CheckpointError, OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
            return False
        except Exception:
            return False  # zipfile raises many kinds of exceptions if a file is incomplete
        return True

    def _small(self, pickled: bytes) -> dict[str, bytes]:
        fixed = {**_FIXED, ".storage_alignment": str(_ALIGNMENT).encode()}
        records = {f"{_FOLDER}/{name}": data for name, data in fixed.items()}
        return {
            f"{_FOLDER}/data.pkl": pickled,
            **records,
            _IDENTITY: self.identity.encode(),
        }

    def _pickled(self) -> tuple[bytes, list[ResultTensor]]:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(self.content)
        return buffer.getvalue(), pickler.storages


class _Pickler(pickle.Pickler):
    """Pickles a ``ResultTensor`` as torch pickles a tensor, and collects it in ``storages``."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=2)
        self.storages: list[ResultTensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return ("storage", value.kind, value.key, "cpu", value.count)

    def reducer_override(self, value: Any) -> Any:
        # Tensors in memory: 'step', extra state, or a model. Sparse tensors consist of dense ones.
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            value = constant(value)
        if not isinstance(value, ResultTensor):
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
    """A storage. ``kind``: its class in torch. ``count``: number of elements (bytes if untyped)."""

    kind: type
    key: str
    count: int


def constant(tensor: torch.Tensor) -> ResultTensor:
    """Makes a ``ResultTensor`` of a tensor in memory."""
    if tensor.is_quantized:
        raise UnsupportedValueError(
            f"a quantized tensor of shape {list(tensor.shape)} cannot be written. Dequantize it."
        )
    values = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    shape = tuple(tensor.shape)
    return ResultTensor("", tensor.dtype, shape, lambda begin, end, out: values[begin:end])


def _storage_name(number: int) -> str:
    return f"{_FOLDER}/data/{number}"


def _open(archive: zipfile.ZipFile, file: _Seekable, record: str, size: int) -> IO[bytes]:
    """Opens a record of the archive for writing, with padding so that its data is aligned."""
    entry = zipfile.ZipInfo(record)
    entry.file_size = size
    wide = size >= _ZIP64_BYTES
    # The header: 30 bytes, the name, the padding (4 bytes and zeros), and 20 for 64-bit sizes.
    header = 30 + len(record.encode()) + 4 + (20 if wide else 0)
    padding = -(file.tell() + header) % _ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    return archive.open(entry, "w", force_zip64=wide)


def _pump(
    storage: ResultTensor, ring: Ring, entry: IO[bytes], progress: Callable[[int], None]
) -> None:
    def take(piece: memoryview) -> None:
        entry.write(piece)
        progress(len(piece))

    # For a few bytes, a thread costs more time than it saves.
    if storage.nbytes > PIECE_BYTES:
        pump(storage.pieces(ring), take)
    else:
        for piece in storage.pieces(ring):
            take(piece)


class _Seekable:
    """A file object for ``zipfile`` that writes to an output."""

    def __init__(self, output: DiskOutput):
        self._output = output
        self._position = self._end = 0

    def write(self, data: bytes | memoryview) -> int:
        if self._position == self._end:
            self._output.write(data)
            self._end += len(data)
        else:
            self._output.write_at(self._position, bytes(data))
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._end)[whence] + position
        return self._position

    def flush(self) -> None:
        """Does nothing: ``write`` does not buffer."""

    def close(self) -> None:
        """Does nothing: the caller closes the output."""
