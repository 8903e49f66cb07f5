"""Digests of chunks (64-bit xxh3), so that a part of a file can be checked without the rest."""

from __future__ import annotations

import xxhash

_LEAST_CHUNK = 1 << 20
_MOST_CHUNKS = 1 << 10
DIGEST_LENGTH = 16


def chunk_bytes(size: int) -> int:
    """Bytes per chunk of a file: 1 MiB, doubled until there are at most 1024 chunks."""
    chunk = _LEAST_CHUNK
    while chunk * _MOST_CHUNKS < size:
        chunk *= 2
    return chunk


def digest(data: bytes | memoryview) -> str:
    """The digest of ``data``: 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


class ChunkDigests:
    def __init__(self, chunk: int):
        self.chunk = chunk
        self._done: list[str] = []
        self._state, self._missing = xxhash.xxh3_64(), chunk

    def update(self, data: memoryview) -> None:
        """``data`` must be one-dimensional."""
        while len(data):
            part, data = data[: self._missing], data[self._missing :]
            self._state.update(part)
            self._missing -= len(part)
            if not self._missing:
                self._end_chunk()

    def finish(self) -> str:
        """The digests of all chunks, joined."""
        if self._missing < self.chunk:
            self._end_chunk()
        return "".join(self._done)

    def _end_chunk(self) -> None:
        self._done.append(self._state.hexdigest())
        self._state, self._missing = xxhash.xxh3_64(), self.chunk
