"""The local or mounted file system to which results are written.

All operations that change the disk are methods of :class:`Disk`, so that tests can simulate
failures.
"""

from __future__ import annotations

import ctypes
import errno
import os

from ..errors import OutputError
from ..format.local import LocalOutput, LocalStore, lock_folder, unwritable

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SYNC_FILE_RANGE_WRITE = 2
_START_BYTES = 1 << 26


class DiskOutput(LocalOutput):
    """A new file in which bytes that were written can be replaced."""

    def __init__(self, path: str):
        super().__init__(path)
        self._written = self._started = 0

    def write(self, data: bytes | memoryview) -> None:
        super().write(data)
        self._written += len(data)
        if self._written - self._started >= _START_BYTES:
            self._start()

    def _start(self) -> None:
        """Asks the system to start writing to the disk, so that ``close`` waits for less.

        Errors are ignored here: ``close`` reports them.
        """
        call = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if call is not None:
            begin, count = ctypes.c_int64(self._started), self._written - self._started
            call(self._descriptor, begin, ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)
        self._started = self._written

    def write_at(self, begin: int, data: bytes) -> None:
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], begin + done)
        except OSError as error:
            unwritable(self.path, error)


class Disk(LocalStore):
    """A :class:`~..format.local.LocalStore` that can also replace files and swap folders.

    All errors are OutputError; the message begins with the path.
    """

    def create(self, path: str) -> DiskOutput:
        return DiskOutput(path)

    def replace(self, old: str, new: str) -> None:
        """Renames a file and replaces an existing one, durably."""
        try:
            os.replace(old, new)
        except OSError as error:
            unwritable(new, error)
        self.sync_folder(os.path.dirname(new) or ".")

    def exchange(self, one: str, other: str) -> bool:
        """Swaps two folders in one step. Returns False if the system cannot do that."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            return False
        names = os.fsencode(one), os.fsencode(other)
        if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            number = ctypes.get_errno()
            if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                return False
            unwritable(other, OSError(number, os.strerror(number)))
        self.sync_folder(os.path.dirname(other) or ".")
        return True

    def lock(self, folder: str) -> int:
        """Locks a folder until the returned descriptor is closed, or the process ends.

        Raises:
            OutputError: another process has locked it.
        """
        try:
            return lock_folder(folder)
        except BlockingIOError as error:
            raise OutputError(
                f"{folder}: another run is writing there. Wait until it has finished."
            ) from error
        except OSError as error:
            unwritable(folder, error)
