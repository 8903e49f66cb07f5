"""One rank's file, written as it is read; ``format.rank_file`` writes one from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ..format.rank_file import FileRecord, widest_first, write_pieces
from .disk import Disk
from .pump import pump
from .tensors import Ring, Stored


def write_rank_file(
    disk: Disk,
    path: str,
    tensors: Iterable[Stored],
    metadata: Mapping[str, str],
    progress: Callable[[int], None],
) -> FileRecord:
    """The same file as ``rank_file.write_file``; durable when this returns.

    Raises:
        OutputError: it cannot be written. What is there of it is left to the caller.
    """
    tensors = widest_first(tensors)

    def pieces() -> Iterator[memoryview]:
        ring = Ring()
        for tensor in tensors:
            yield from tensor.pieces(ring)

    def feed(take: Callable[[memoryview], None]) -> None:
        def taken(piece: memoryview) -> None:
            take(piece)
            progress(len(piece))

        pump(pieces(), taken)

    return write_pieces(disk, path, [(t.name, t.dtype, t.shape) for t in tensors], metadata, feed)
