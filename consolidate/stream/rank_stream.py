"""One rank's file, written as it is read; ``format.rank_file`` writes one from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ..format.container import layout
from ..format.digests import ChunkDigests, chunk_bytes
from ..format.dtypes import DTYPES
from ..format.rank_file import FileRecord
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
    # Wide types first, so that every tensor begins at a multiple of its own item size.
    tensors = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)
    container, header = layout([(t.name, t.dtype, t.shape) for t in tensors], metadata)
    digests = ChunkDigests(chunk_bytes(container.size))
    output = disk.create(path)

    def take(piece: memoryview) -> None:
        digests.update(piece)
        output.write(piece)
        progress(len(piece))

    def pieces() -> Iterator[memoryview]:
        ring = Ring()
        yield memoryview(header)
        for tensor in tensors:
            yield from tensor.pieces(ring)

    try:
        pump(pieces(), take)
        output.close()
    except BaseException:
        output.discard()
        raise
    name = path.rpartition("/")[2]
    return FileRecord(name, container.size, digests.chunk, tuple(digests.finish()))
