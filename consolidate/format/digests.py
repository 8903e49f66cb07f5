"""Digests of the chunks of a file, so that a part of a file can be checked without the rest.

The digest is xxh3 with 64 bits. It detects accidental changes (one in 2**64 is missed), but not
those of an attacker, who can change the manifest too. Unlike SHA-256, it is faster than memory.
"""

from __future__ import annotations

import xxhash

_LEAST_CHUNK = 1 << 20
_MOST_CHUNKS = 1 << 10


def chunk_bytes(size: int) -> int:
    """Size in bytes of the chunks of a file of ``size`` bytes.

    It is 1 MiB, doubled until there are at most 1024 chunks.
    """
    chunk = _LEAST_CHUNK
    while chunk * _MOST_CHUNKS < size:
        chunk *= 2
    return chunk


def digest(data: bytes | memoryview) -> str:
    """The xxh3 digest of ``data``: 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


class ChunkDigests:
    """Computes a digest for every ``chunk`` bytes of a stream of bytes."""

    def __init__(self, chunk: int):
        self.chunk = chunk
        self._done: list[str] = []
        self._state, self._missing = xxhash.xxh3_64(), chunk

    def update(self, data: memoryview) -> None:
        """Adds the next bytes. ``data`` must be one-dimensional."""
        while len(data):
            part, data = data[: self._missing], data[self._missing :]
            self._state.update(part)
            self._missing -= len(part)
            if not self._missing:
                self._end_chunk()

    def finish(self) -> list[str]:
        """Returns the digests of all chunks. The last chunk may be shorter."""
        if self._missing < self.chunk:
            self._end_chunk()
        return self._done

    def _end_chunk(self) -> None:
        self._done.append(self._state.hexdigest())
        self._state, self._missing = xxhash.xxh3_64(), self.chunk
