"""A store on a local or mounted file system, with fsync before the next step of a save."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from typing import NoReturn

from ..errors import CheckpointNotFoundError, OutputError, UnreadableFileError

# A file descriptor that is never valid.
_CLOSED = -1


class LocalStore:
    """A file system with rename and fsync; see :class:`~.store.Store`."""

    renames = True

    def create(self, path: str) -> LocalOutput:
        return LocalOutput(path)

    def size(self, path: str) -> int:
        try:
            status = os.lstat(path)
        except OSError as error:
            _unreadable(path, error)
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise UnreadableFileError(f"{path}: is {kind}, expected a file")
        return status.st_size

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        try:
            # Do not follow a link, and do not block if the path is a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._fill(path, descriptor, begin, out)
            finally:
                os.close(descriptor)
        except OSError as error:
            _unreadable(path, error)

    def _fill(self, path: str, descriptor: int, begin: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], begin + done)
            if not count:
                raise UnreadableFileError(
                    f"{path}: ends at byte {begin + done}, expected at least {begin + len(out)} "
                    "bytes: it is truncated"
                )
            done += count

    def list(self, path: str) -> list[str]:
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            _unreadable(path, error)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def make_folder(self, path: str) -> None:
        made, above = list[str](), path
        while above and not os.path.lexists(above):
            made, above = [above, *made], os.path.dirname(above)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            unwritable(path, error)
        for each in made:
            with contextlib.suppress(OutputError):  # no permission to read the parent
                self.sync_folder(os.path.dirname(each) or ".")

    def rename(self, old: str, new: str) -> None:
        try:
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, "exists already")
            os.rename(old, new)
        except OSError as error:
            unwritable(new, error)
        self.sync_folder(os.path.dirname(new) or ".")

    def remove(self, path: str) -> None:
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
        except FileNotFoundError:
            pass  # another process has removed it
        except OSError as error:
            unwritable(path, error)

    def sync_folder(self, path: str) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            # Some network file systems do not support fsync of folders, and do not need it.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                unwritable(path, error)

    def hold_lock(self, path: str) -> object:
        try:
            return FolderLock(path)
        except OSError:
            return None

    def is_locked(self, path: str) -> bool:
        try:
            FolderLock(path)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def lock_folder(path: str) -> int:
    """Locks a folder until the returned descriptor is closed, or the process ends.

    On a file system without locks, nothing is locked.

    Raises:
        BlockingIOError: another process or descriptor has locked the folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor


class FolderLock:
    """The lock of a folder. It is released when this object is deleted."""

    def __init__(self, path: str):
        self._descriptor = lock_folder(path)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class LocalOutput:
    """A new file; see :class:`~.store.Output`."""

    def __init__(self, path: str):
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            unwritable(path, error)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view[: 1 << 30]) :]
        except OSError as error:
            unwritable(self.path, error)

    def close(self) -> None:
        try:
            try:
                os.fsync(self._descriptor)
            finally:
                self._close()
        except OSError as error:
            unwritable(self.path, error)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        # Close only once: another thread may reuse the number of the descriptor.
        descriptor, self._descriptor = self._descriptor, _CLOSED
        if descriptor != _CLOSED:
            os.close(descriptor)


def unwritable(path: str, error: OSError) -> NoReturn:
    raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _unreadable(path: str, error: OSError) -> NoReturn:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise CheckpointNotFoundError(f"{path}: does not exist") from error
    if error.errno == errno.ELOOP:
        raise UnreadableFileError(f"{path}: is a symbolic link, expected a file") from error
    raise UnreadableFileError(f"{path}: cannot be read: {error.strerror or error}") from error
