"""Access to files on a file system or an object store. All writing goes through a store."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import OptionsError
from .local import LocalStore

if TYPE_CHECKING:
    from .remote import RemoteStore

_PIECE = 4 << 20


# Writing raises OutputError, reading CheckpointNotFoundError and UnreadableFileError.
Store: TypeAlias = "LocalStore | RemoteStore"


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


def path_text(path: Any, label: str = "path") -> str:
    """``path`` as text. Raises TypeError, which names the argument ``label``, if it is no path."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{label} must be a str or a path, got {type(path).__name__}") from None


def open_store(path: Any, label: str = "path") -> tuple[Store, str]:
    """Opens the store of ``path``, local or a URL for fsspec. Returns it and the path inside it.

    ``label`` names the argument in messages. Raises TypeError if ``path`` is not a path,
    OptionsError if it is empty or its protocol is not installed.
    """
    text = path_text(path, label)
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
    return LocalStore(), text.rstrip("/") or "/"
