"""Where files live: a local or mounted file system, or anything that fsspec opens.

The rest of the package writes through the few operations of :class:`Store`, each of which is a
boundary at which a process may die; a test can put its own in between.
"""

from __future__ import annotations

import posixpath
from typing import Any, Protocol

_PIECE = 4 << 20


class Output(Protocol):
    """A file in the making. ``close`` makes it durable; without it the file may be anything."""

    def write(self, data: bytes | memoryview) -> None: ...

    def close(self) -> None: ...

    def discard(self) -> None:
        """Closes without making durable, after an error."""


class Store(Protocol):
    """Operations on files by path.

    Errors come as :class:`~..errors.OutputError` when writing, ``CheckpointNotFoundError`` and
    ``UnreadableFileError`` when reading, all naming the path.

    Attributes:
        renames: whether a folder can be renamed in one step. Where not (object stores), a folder
            becomes a checkpoint when its manifest, written last, appears.
    """

    renames: bool

    def create(self, path: str) -> Output:
        """A new file; it is an error if there is one."""

    def size(self, path: str) -> int:
        """Bytes of the file at ``path``, which must be a file, not a link to one."""

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``begin``; too few are an error."""

    def list(self, path: str) -> list[str]:
        """Names in a folder; none if there is no folder."""

    def is_folder(self, path: str) -> bool: ...

    def make_folder(self, path: str) -> None:
        """With its parents; nothing if it is there."""

    def rename(self, old: str, new: str) -> None:
        """Only if :attr:`renames`; durable when it returns. ``new`` must not exist."""

    def remove(self, path: str) -> None:
        """A file, or a folder with all in it; nothing if there is none."""

    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder durable."""

    def hold(self, path: str) -> object:
        """Marks a folder as being written to, for as long as the result and this process exist.
        Where the store cannot, nothing is marked."""

    def is_held(self, path: str) -> bool:
        """Whether somebody holds a folder."""


def read(store: Store, path: str, begin: int, end: int) -> bytes:
    """The bytes ``begin .. end`` of a file. Takes memory for what is there, not for what a store
    said that there is."""
    data = bytearray()
    for at in range(begin, end, _PIECE):
        piece = bytearray(min(_PIECE, end - at))
        store.read_into(path, at, memoryview(piece))
        data += piece
    return bytes(data)


def holds(store: Store, path: str, data: bytes) -> bool:
    """Whether a file is ``data`` and nothing else; no more than that is read of it."""
    return store.size(path) == len(data) and read(store, path, 0, len(data)) == data


def write(store: Store, path: str, data: bytes) -> None:
    """A small file, durable when this returns; nothing is left of one that fails."""
    output = store.create(path)
    try:
        output.write(data)
        output.close()
    except BaseException:
        output.discard()
        raise


def join(*parts: str) -> str:
    """A path from its parts, for any store."""
    return posixpath.join(*parts)


def open_store(path: Any, label: str = "path") -> tuple[Store, str]:
    """The store that ``path`` points into, and the path there.

    ``gs://bucket/run`` goes to fsspec, which needs the package for that protocol; anything without
    ``://`` is a local path.

    Raises:
        TypeError, ValueError: ``path`` is no path, empty, or of a protocol that is not installed.
    """
    import os

    try:
        text = os.fspath(path)
    except TypeError:
        raise TypeError(f"{label} must be a path, got {type(path).__name__}") from None
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text or "\0" in text:
        raise ValueError(f"{label} must be a path, got {text!r}")
    for prefix in ("file://", "local://"):
        if text.startswith(prefix):
            text = text[len(prefix) :]
            if not text.startswith("/"):
                raise ValueError(f"{label} must be {prefix} and an absolute path, got {path!r}")
    if "://" in text:
        from .remote import RemoteStore

        return RemoteStore.open(text, label)
    from .local import LocalStore

    return LocalStore(), text.rstrip("/") or "/"
