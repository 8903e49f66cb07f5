"""A store on a local or mounted file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator

from ..errors import CheckpointNotFoundError, NotAFolderError, OutputError, UnreadableFileError

_CLOSED = -1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class LocalStore:
    """:class:`~.remote.RemoteStore` has the same methods, except ``replace`` and ``exchange``.

    ``renames``: whether a folder can be renamed in one step.
    """

    renames = True

    def create(self, path: str) -> LocalOutput:
        """Raises OutputError if the file exists."""
        return LocalOutput(path)

    def size(self, path: str) -> int:
        """Bytes of a file. Raises UnreadableFileError if it is a link."""
        with _reading(path):
            status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise UnreadableFileError(f"{path}: is {kind}, expected a file")
        return status.st_size

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        """Fills ``out`` from ``begin``. Raises UnreadableFileError if the file is too short."""
        done = 0
        with _reading(path):
            # Do not follow a link, and do not block if the path is a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.closing(_Descriptor(descriptor)):
                while done < len(out):
                    count = os.preadv(descriptor, [out[done:]], begin + done)
                    if not count:
                        raise UnreadableFileError(
                            f"{path}: ends at byte {begin + done}, expected at least "
                            f"{begin + len(out)} bytes: it is truncated"
                        )
                    done += count

    def list(self, path: str) -> list[str]:
        """Names in a folder, empty if there is none."""
        with _reading(path), contextlib.suppress(FileNotFoundError):
            return os.listdir(path)
        return []

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def url(self, path: str) -> str:
        """``path`` as messages show it."""
        return path

    def make_folder(self, path: str) -> None:
        """Makes a folder and its parents if there is none, and makes its name durable."""
        made, above = list[str](), path
        while above and not os.path.lexists(above):
            made, above = [above, *made], os.path.dirname(above)
        with _writing(path):
            os.makedirs(path, exist_ok=True)
        for each in made or [path]:
            with contextlib.suppress(OutputError):  # no permission to read the parent
                self.sync_folder(os.path.dirname(each) or ".")

    def rename(self, old: str, new: str) -> None:
        """Renames durably. ``new`` must not exist."""
        with _writing(new):
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, "exists already")
            os.rename(old, new)
        self.sync_folder(os.path.dirname(new) or ".")

    def replace(self, old: str, new: str) -> None:
        with _writing(new):
            os.replace(old, new)
        self.sync_folder(os.path.dirname(new) or ".")

    def exchange(self, one: str, other: str) -> bool:
        """Swaps two folders in one step. Returns False if the system cannot."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            return False
        names = os.fsencode(one), os.fsencode(other)
        if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            number = ctypes.get_errno()
            if number in _UNSUPPORTED:
                return False
            with _writing(other):
                raise OSError(number, os.strerror(number))
        self.sync_folder(os.path.dirname(other) or ".")
        return True

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with its content, if it exists."""
        with _writing(path), contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)

    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder durable."""
        with _writing(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.closing(_Descriptor(descriptor)):
                try:
                    os.fsync(descriptor)
                except OSError as error:
                    # Some network file systems do not support it, nor need it.
                    if error.errno not in _UNSUPPORTED:
                        raise

    def hold_lock(self, path: str) -> object:
        """Locks a folder while the returned object exists, if the file system has locks."""
        with contextlib.suppress(OSError):
            return FolderLock(path)
        return None

    def is_locked(self, path: str) -> bool:
        try:
            FolderLock(path).close()
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class _Descriptor:
    """A file descriptor that is closed once, at the latest when this object is deleted."""

    def __init__(self, number: int):
        self.number = number

    def close(self) -> None:
        # Another thread may reuse the number of the descriptor.
        number, self.number = self.number, _CLOSED
        if number != _CLOSED:
            os.close(number)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            _Descriptor.close(self)


class FolderLock(_Descriptor):
    """The lock of a folder, if the file system has locks. Raises BlockingIOError if it is taken."""

    def __init__(self, path: str):
        super().__init__(_CLOSED)
        self.number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise
        except OSError:
            pass


class LocalOutput(_Descriptor):
    def __init__(self, path: str):
        super().__init__(_CLOSED)
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _writing(path):
            self.number = os.open(path, flags, 0o666)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        with _writing(self.path):
            while view:
                view = view[os.write(self.number, view[: 1 << 30]) :]
        return len(data)

    def flush(self) -> None:
        """Does nothing: ``write`` does not buffer."""

    def write_at(self, begin: int, data: bytes) -> None:
        with _writing(self.path):
            done = 0
            while done < len(data):
                done += os.pwrite(self.number, data[done:], begin + done)

    def close(self) -> None:
        with _writing(self.path):
            try:
                os.fsync(self.number)
            finally:
                super().close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: does not exist") from error
    except NotADirectoryError as error:
        raise NotAFolderError(f"{path}: is a file or in one, expected a folder") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnreadableFileError(f"{path}: is a symbolic link, expected a file") from error
        raise UnreadableFileError(f"{path}: cannot be read: {error.strerror or error}") from error
