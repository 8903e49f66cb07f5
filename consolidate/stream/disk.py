"""Where results are written: a local or mounted file system.

Every operation that changes the disk goes through this class; a test can put its own in between.
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
    """A new file, of which earlier parts may be written again."""

    def __init__(self, path: str):
        super().__init__(path)
        self._written = self._started = 0

    def write(self, data: bytes | memoryview) -> None:
        super().write(data)
        self._written += len(data)
        if self._written - self._started >= _START_BYTES:
            self._start()

    def _start(self) -> None:
        """Has the system begin to store what was written, so that ``close`` need not wait for all
        of it. Only a hint; what fails, fails again in ``close``."""
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
    """A :class:`~..format.local.LocalStore` that can also put one thing in the place of another.

    All errors are OutputError, naming the path.
    """

    def create(self, path: str) -> DiskOutput:
        return DiskOutput(path)

    def replace(self, old: str, new: str) -> None:
        """Renames a file over another, if there is one; durable when it returns."""
        try:
            os.replace(old, new)
        except OSError as error:
            unwritable(new, error)
        self.sync_folder(os.path.dirname(new) or ".")

    def exchange(self, one: str, other: str) -> bool:
        """Swaps two folders in one step; False where the system cannot."""
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
        """Claims a folder until the descriptor that it returns is closed, or the process ends.

        Raises:
            OutputError: another process has claimed it.
        """
        try:
            return lock_folder(folder)
        except BlockingIOError as error:
            raise OutputError(
                f"{folder}: another run is writing there; wait for it to end"
            ) from error
        except OSError as error:
            unwritable(folder, error)
