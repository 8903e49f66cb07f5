"""One safetensors file of the result, which says in its header what it is and what is in it.

``__metadata__`` holds, beside what the plan says, ``"digest"``: xxh3 of all bytes after the header.
The header is written last, so that a file that was not finished has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import xxhash

from ..errors import CheckpointError
from ..format.container import layout
from ..format.rank_file import widest_first
from .disk import Disk
from .pump import pump
from .tensors import PIECE_BYTES, Stored, pieces

_UNKNOWN = "0" * 16


@dataclass(frozen=True)
class SafetensorsFile:
    """What is to be written; see :class:`~.plan.Plan`."""

    name: str
    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, disk: Disk, path: str, progress: Callable[[int], None]) -> None:
        """Durable when this returns. Raises OutputError, and whatever reading raises."""
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
        """Whether that is what lies at ``path``, every byte looked at."""
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
