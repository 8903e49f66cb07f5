"""A store on any file system of fsspec. Answers of the store are not trusted."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fsspec
from fsspec.core import has_magic

from ..errors import (
    CheckpointNotFoundError,
    OptionsError,
    OutputError,
    UnreadableFileError,
    first_line,
)

T = TypeVar("T")

# Clients retry automatically, for minutes.
_SECONDS_VARIABLE, _SECONDS = "XLA_FSDP_STORE_SECONDS", 600.0
_SLOWEST = 1 << 20  # bytes per second; added to the limit of a read
_USER = re.compile(r"(?<=://)[^/\s?#@]*@")
_QUERY = re.compile(r"(\w+://[^\s?#'\"]*)\?[^\s'\")]*")


class RemoteStore:
    renames = False

    def __init__(self, files: Any, protocol: str):
        self.files = files
        self.protocol = protocol

    @classmethod
    def open(cls, url: str, label: str) -> tuple[RemoteStore, str]:
        """Raises OptionsError if the protocol is not installed, otherwise UnreadableFileError."""
        try:
            # No cache of listings, because other ranks write too.
            files, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError, TypeError) as error:
            raise OptionsError(f"{label} {_redact(url)!r} cannot be opened: {error}") from error
        except Exception as error:
            raise UnreadableFileError(
                f"{_redact(url)}: cannot be opened: {type(error).__name__}: {_redacted(error)}"
            ) from error
        return cls(files, url.partition("://")[0]), path

    def create(self, path: str) -> RemoteOutput:
        with self.writing(path):
            if self.files.exists(path):
                raise FileExistsError(
                    "exists already: another save writes into the same folder. Wait until it ends"
                )
            return RemoteOutput(self, path, self.files.open(path, "wb"))

    def size(self, path: str) -> int:
        def query() -> int:
            about = self.files.info(path)
            if about["type"] != "file":
                raise IsADirectoryError(f"is a {about['type']}, expected a file")
            if type(about["size"]) is not int:
                raise TypeError(f"the store reports a size of {about['size']!r:.40}")
            return int(about["size"])

        return self._call(path, query)

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        def query() -> bytes:
            data = self.files.cat_file(path, start=begin, end=begin + len(out))
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise TypeError(f"the store sent a {type(data).__name__}, expected bytes")
            return bytes(data)

        if not out:
            return
        data = self._call(path, query, len(out) / _SLOWEST)
        if len(data) > len(out):
            raise UnreadableFileError(
                f"{self.url(path)}: the store sent {len(data)} bytes, but {len(out)} were "
                "requested: it cannot send a part of a file. Use another store."
            )
        if len(data) < len(out):
            raise UnreadableFileError(
                f"{self.url(path)}: ends at byte {begin + len(data)}, expected at least "
                f"{begin + len(out)} bytes: it is truncated"
            )
        out[:] = data

    def list(self, path: str) -> list[str]:
        def query() -> list[str]:
            found = self.files.ls(path, detail=False)
            # A path outside this folder becomes a name inside it.
            return [name.rstrip("/").rpartition("/")[2] for name in found]

        with contextlib.suppress(CheckpointNotFoundError):
            return self._call(path, query)
        return []

    def is_folder(self, path: str) -> bool:
        return self._call(path, lambda: bool(self.files.isdir(path)))

    def _call(self, path: str, query: Callable[[], T], more: float = 0.0) -> T:
        """Calls ``query()`` with a time limit. A thread that hangs cannot be stopped."""
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def run() -> None:
            try:
                self.files.invalidate_cache()
                answers.put((query(), None))
            except BaseException as error:
                answers.put((None, error))

        try:
            seconds = _seconds_without_answer() + more
            threading.Thread(target=run, name="xla_fsdp store", daemon=True).start()
            try:
                answer, error = answers.get(timeout=seconds)
            except queue.Empty:
                raise TimeoutError(
                    f"no answer within {seconds:.3g} s ({_SECONDS_VARIABLE} sets another limit)"
                ) from None
            if error is not None:
                raise error
            return answer
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{self.url(path)}: does not exist") from error
        except Exception as error:
            raise UnreadableFileError(
                f"{self.url(path)}: cannot be read: {_redacted(error)}"
            ) from error

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OutputError(f"{self.url(path)}: cannot be written: {_redacted(error)}") from error

    def make_folder(self, path: str) -> None:
        with self.writing(path):
            self.files.makedirs(path, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("a folder of an object store cannot be renamed in one step")

    def remove(self, path: str) -> None:
        with self.writing(path):
            self.files.invalidate_cache()
            if not has_magic(path):
                with contextlib.suppress(FileNotFoundError):
                    self.files.rm(path, recursive=True)
                return
            # `rm` would treat the path as a pattern.
            for found in sorted(self.files.find(path)):
                if found.startswith(f"{path}/") and ".." not in found.split("/"):
                    self.files.rm_file(found)
            with contextlib.suppress(Exception):  # most have no folders
                self.files.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """Does nothing: objects are durable when they appear."""

    def hold_lock(self, path: str) -> object:
        """Does nothing: object stores have no locks."""

    def is_locked(self, path: str) -> bool:
        return False

    def url(self, path: str) -> str:
        return _redact(f"{self.protocol}://{path.lstrip('/')}")


class RemoteOutput:
    def __init__(self, store: RemoteStore, path: str, file: Any):
        self.store = store
        self.path = path
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        with self.store.writing(self.path):
            self._file.write(data)

    def close(self) -> None:
        with self.store.writing(self.path):
            self._file.close()

    def discard(self) -> None:
        # Closing the file would create an incomplete object.
        with contextlib.suppress(Exception):
            self._file.discard() if hasattr(self._file, "discard") else None
        with contextlib.suppress(Exception):
            self._file.closed = True  # else deleting it closes it


def _redacted(error: Exception) -> str:
    return _redact(first_line(error))[:200]


def _seconds_without_answer() -> float:
    given = os.environ.get(_SECONDS_VARIABLE, "")
    try:
        seconds = float(given) if given else _SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{_SECONDS_VARIABLE}={given!r}: expected a positive number of seconds")
    return seconds


def _redact(text: str) -> str:
    """Removes users, passwords and queries of URLs, which may have secrets."""
    return _QUERY.sub(r"\1?...", _USER.sub("...@", text))
