"""Digests of the chunks of a file, so that a part of a file can be checked without the rest.

The digest is xxh3 with 64 bits. It detects accidental changes (one in 2**64 is missed), but not
those of an attacker, who can change the manifest too. Unlike SHA-256, it is faster than memory.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        self.done: list[str] = []
        self.size = 0
        self._state = xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        """Adds the next bytes. ``data`` must be one-dimensional."""
        for part in self._parts(data):
            self._state.update(part)
            self.size += len(part)
            if self.size % self.chunk == 0:
                self._end_chunk()

    def finish(self) -> list[str]:
        """Returns the digests of all chunks. The last chunk may be shorter."""
        if self.size % self.chunk:
            self._end_chunk()
        return self.done

    def _parts(self, data: memoryview) -> Iterator[memoryview]:
        begin = 0
        while begin < len(data):
            end = min(begin + self.chunk - self.size % self.chunk, len(data))
            yield data[begin:end]
            begin = end

    def _end_chunk(self) -> None:
        self.done.append(self._state.hexdigest())
        self._state.reset()
