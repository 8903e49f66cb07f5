"""Digests of files in chunks, so that a part of a file can be checked without the rest.

xxh3 with 64 bits: made to find accidents (a flipped bit slips through once in 2**64), not to stop
somebody who can rewrite the manifest as well. Faster than memory, unlike SHA-256.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

_LEAST_CHUNK = 1 << 20
_MOST_CHUNKS = 1 << 10


def chunk_bytes(size: int) -> int:
    """How large chunks of a file of ``size`` bytes are: 1 MiB, or a power of two of it, such that
    there are at most 1024."""
    chunk = _LEAST_CHUNK
    while chunk * _MOST_CHUNKS < size:
        chunk *= 2
    return chunk


def digest(data: bytes | memoryview) -> str:
    """16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


class ChunkDigests:
    """Digests of what is fed in, every ``chunk`` bytes."""

    def __init__(self, chunk: int):
        self.chunk = chunk
        self.done: list[str] = []
        self.size = 0
        self._state = xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        """Takes the next bytes, ``data`` being flat."""
        for part in self._parts(data):
            self._state.update(part)
            self.size += len(part)
            if self.size % self.chunk == 0:
                self._end_chunk()

    def finish(self) -> list[str]:
        """The digests of all chunks, the last of which may be shorter."""
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
