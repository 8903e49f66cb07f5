"""Object stores and everything else that fsspec opens: ``gs://``, ``s3://``, ``memory://``.

An object appears whole when its writing is closed, and cannot be renamed in one step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import fsspec
from fsspec.core import has_magic

from ..errors import CheckpointNotFoundError, OutputError, UnreadableFileError


class RemoteStore:
    """A file system of fsspec; see :class:`~.store.Store`."""

    renames = False

    def __init__(self, files: Any, protocol: str):
        self.files = files
        self.protocol = protocol

    @classmethod
    def open(cls, url: str, label: str) -> tuple[RemoteStore, str]:
        """The store of a URL, and the path there.

        Raises:
            ValueError: no package for this protocol is installed, or the URL is malformed.
        """
        try:
            # Listings are asked for anew each time: other ranks write, too.
            files, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError, TypeError) as error:
            raise ValueError(f"{label} {url!r} cannot be opened: {error}") from error
        return cls(files, url.partition("://")[0]), path

    def create(self, path: str) -> RemoteOutput:
        with _writing(path, self):
            if self.files.exists(path):
                raise FileExistsError("exists already")
            return RemoteOutput(self, path, self.files.open(path, "wb"))

    def size(self, path: str) -> int:
        with _reading(path, self):
            self.files.invalidate_cache()
            about = self.files.info(path)
            if about["type"] != "file":
                raise IsADirectoryError(f"is a {about['type']}, expected a file")
            return int(about["size"])

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        with _reading(path, self):
            data = self.files.cat_file(path, start=begin, end=begin + len(out)) if out else b""
        if len(data) != len(out):
            raise UnreadableFileError(
                f"{self.url(path)}: ends at byte {begin + len(data)}, expected "
                f"{begin + len(out)} or more"
            )
        out[:] = data

    def list(self, path: str) -> list[str]:
        try:
            with _reading(path, self):
                self.files.invalidate_cache()
                found = self.files.ls(path, detail=False)
        except CheckpointNotFoundError:
            return []
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def is_folder(self, path: str) -> bool:
        with _reading(path, self):
            self.files.invalidate_cache()
            return self.files.isdir(path)

    def make_folder(self, path: str) -> None:
        with _writing(path, self):
            self.files.makedirs(path, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("a folder of an object store cannot be renamed in one step")

    def remove(self, path: str) -> None:
        with _writing(path, self):
            self.files.invalidate_cache()
            if not has_magic(path):
                with contextlib.suppress(FileNotFoundError):
                    self.files.rm(path, recursive=True)
                return
            # `rm` would take it for a pattern, and remove what it matches.
            for found in sorted(self.files.find(path)):
                self.files.rm_file(found)
            with contextlib.suppress(Exception):  # most have no folders
                self.files.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """Objects are durable when they appear."""

    def hold(self, path: str) -> object:
        """Object stores have no locks."""

    def is_held(self, path: str) -> bool:
        return False

    def url(self, path: str) -> str:
        return f"{self.protocol}://{path.lstrip('/')}"


class RemoteOutput:
    """A new object; see :class:`~.store.Output`."""

    def __init__(self, store: RemoteStore, path: str, file: Any):
        self.store = store
        self.path = path
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        with _writing(self.path, self.store):
            self._file.write(data)

    def close(self) -> None:
        with _writing(self.path, self.store):
            self._file.close()

    def discard(self) -> None:
        # Closing would make an object of what is there so far.
        with contextlib.suppress(Exception):
            self._file.discard() if hasattr(self._file, "discard") else None
        with contextlib.suppress(Exception):
            self._file.closed = True  # else it is closed when it is freed


@contextlib.contextmanager
def _writing(path: str, store: RemoteStore) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # client libraries have exceptions of their own
        _raise(OutputError, path, store, "cannot be written", error)


@contextlib.contextmanager
def _reading(path: str, store: RemoteStore) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{store.url(path)}: does not exist") from error
    except Exception as error:
        _raise(UnreadableFileError, path, store, "cannot be read", error)


def _raise(kind: type, path: str, store: RemoteStore, what: str, error: Exception) -> NoReturn:
    reason = str(error).partition("\n")[0] or type(error).__name__
    raise kind(f"{store.url(path)}: {what}: {reason:.200}") from error
