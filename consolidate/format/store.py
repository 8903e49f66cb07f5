"""Access to files: on a local or mounted file system, or in a store that fsspec opens.

The rest of the package writes only through the operations of :class:`Store`. Tests replace the
store to simulate a failure before or after each operation.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator
from typing import Any, Protocol

from ..errors import OptionsError

_PIECE = 4 << 20


class Output(Protocol):
    """A file that is being written. Only ``close`` makes its content complete and durable."""

    def write(self, data: bytes | memoryview) -> object: ...

    def close(self) -> None: ...

    def discard(self) -> None:
        """Closes the file after an error, without making it durable."""


class Store(Protocol):
    """Operations on files by path.

    Writing raises :class:`~..errors.OutputError`. Reading raises ``CheckpointNotFoundError`` and
    ``UnreadableFileError``. All messages begin with the path.

    Attributes:
        renames: whether a folder can be renamed in one step. If not (object stores), a folder
            becomes a checkpoint when its manifest, which is written last, appears.
    """

    renames: bool

    def create(self, path: str) -> Output:
        """Creates a file. Raises OutputError if it exists."""

    def size(self, path: str) -> int:
        """Size in bytes of the file at ``path``. Raises UnreadableFileError if it is a link."""

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``begin``. Raises UnreadableFileError if the file is
        too short."""

    def list(self, path: str) -> list[str]:
        """Names in a folder. An empty list if there is no folder."""

    def is_folder(self, path: str) -> bool: ...

    def make_folder(self, path: str) -> None:
        """Makes a folder and its parents, if they do not exist."""

    def rename(self, old: str, new: str) -> None:
        """Renames a file or folder, durably. Call it only if :attr:`renames`; ``new`` must not
        exist."""

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with its content, if it exists."""

    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder durable."""

    def hold_lock(self, path: str) -> object:
        """Locks a folder as long as the returned object and this process exist.

        Does nothing in a store without locks.
        """

    def is_locked(self, path: str) -> bool:
        """Whether a running save has locked a folder with :meth:`hold_lock`."""


def read(store: Store, path: str, begin: int, end: int) -> bytes:
    """Reads the bytes ``begin .. end`` of a file, in pieces.

    So memory is bounded by the real size of the file, also if a store reports a wrong size.
    """
    data = bytearray()
    for at in range(begin, end, _PIECE):
        piece = bytearray(min(_PIECE, end - at))
        store.read_into(path, at, memoryview(piece))
        data += piece
    return bytes(data)


def content_equals(store: Store, path: str, data: bytes) -> bool:
    """Whether the content of a file is exactly ``data``."""
    return store.size(path) == len(data) and read(store, path, 0, len(data)) == data


@contextlib.contextmanager
def creating(store: Store, path: str) -> Iterator[Any]:
    """A new :class:`Output`, which is durable when the context ends without an error."""
    output = store.create(path)
    try:
        yield output
        output.close()
    except BaseException:
        output.discard()
        raise


def write(store: Store, path: str, data: bytes) -> None:
    """Writes a small file, which is durable when this returns."""
    with creating(store, path) as output:
        output.write(data)


def join(*parts: str) -> str:
    """Joins the parts of a path, for any store."""
    return posixpath.join(*parts)


def open_store(path: Any, label: str = "path") -> tuple[Store, str]:
    """Opens the store of ``path``. Returns it and the path inside the store.

    fsspec opens URLs such as ``gs://bucket/run``, and needs the package of the protocol. A path
    without ``://`` is a local path. ``label`` names the argument in messages.

    Raises:
        TypeError: ``path`` is not a path.
        OptionsError: it is empty, or its protocol is not installed.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise TypeError(f"{label} must be a str or a path, got {type(path).__name__}") from None
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text or "\0" in text:
        raise OptionsError(f"{label} must be a non-empty path without NUL, got {text!r}")
    for prefix in ("file://", "local://"):
        if text.startswith(prefix):
            text = text[len(prefix) :]
            if not text.startswith("/"):
                raise OptionsError(f"{label} must be {prefix} with an absolute path, got {path!r}")
    if "://" in text:
        from .remote import RemoteStore

        return RemoteStore.open(text, label)
    from .local import LocalStore

    return LocalStore(), text.rstrip("/") or "/"
