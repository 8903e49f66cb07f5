"""Access to files on a file system or an object store. All writing goes through :class:`Store`."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator
from typing import Any, Protocol

from ..errors import OptionsError

_PIECE = 4 << 20


class Output(Protocol):
    """A file that is being written. Only ``close`` makes it complete and durable."""

    def write(self, data: bytes | memoryview) -> object: ...

    def close(self) -> None: ...

    def discard(self) -> None:
        """Closes the file after an error."""


class Store(Protocol):
    """Operations on files by path.

    Writing raises :class:`~..errors.OutputError`, reading ``CheckpointNotFoundError`` and
    ``UnreadableFileError``. ``renames``: whether a folder can be renamed in one step.
    """

    renames: bool

    def create(self, path: str) -> Output:
        """Raises OutputError if the file exists."""

    def size(self, path: str) -> int:
        """Bytes of a file. Raises UnreadableFileError if it is a link."""

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        """Fills ``out`` from ``begin``. Raises UnreadableFileError if the file is too short."""

    def list(self, path: str) -> list[str]:
        """Names in a folder, empty if there is none."""

    def is_folder(self, path: str) -> bool: ...

    def make_folder(self, path: str) -> None:
        """Makes a folder and its parents, if they do not exist."""

    def rename(self, old: str, new: str) -> None:
        """Renames durably, if :attr:`renames`. ``new`` must not exist."""

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with its content, if it exists."""

    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder durable."""

    def hold_lock(self, path: str) -> object:
        """Locks a folder while the returned object exists, if the store has locks."""

    def is_locked(self, path: str) -> bool:
        """Whether a running save has locked the folder."""


def read(store: Store, path: str, begin: int, end: int) -> bytes:
    """Reads in pieces: a store that reports too large a size must not cost memory."""
    data = bytearray()
    for at in range(begin, end, _PIECE):
        piece = bytearray(min(_PIECE, end - at))
        store.read_into(path, at, memoryview(piece))
        data += piece
    return bytes(data)


def content_equals(store: Store, path: str, data: bytes) -> bool:
    return store.size(path) == len(data) and read(store, path, 0, len(data)) == data


@contextlib.contextmanager
def creating(store: Store, path: str) -> Iterator[Any]:
    output = store.create(path)
    try:
        yield output
        output.close()
    except BaseException:
        output.discard()
        raise


def write(store: Store, path: str, data: bytes) -> None:
    with creating(store, path) as output:
        output.write(data)


def join(*parts: str) -> str:
    return posixpath.join(*parts)


def open_store(path: Any, label: str = "path") -> tuple[Store, str]:
    """Opens the store of ``path``, local or a URL for fsspec. Returns it and the path inside it.

    ``label`` names the argument in messages. Raises TypeError if ``path`` is not a path,
    OptionsError if it is empty or its protocol is not installed.
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
