"""A disk on which the n-th system call fails, or kills the process."""

import errno
import os
import signal
import threading
import traceback
from dataclasses import dataclass, field

CHANGES = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
CALLS = (*CHANGES, "close")


@dataclass
class Boundaries:
    """Counts the system calls that change files under ``root``; at the ``at``-th something happens.

    A write counts twice: before it, and when half of it is done. forever: it happens at each later
    one, too.
    """

    root: str
    at: int
    happen: object  # called with the name of the call
    only: tuple = CALLS
    forever: bool = False
    count: int = 0
    descriptors: set = field(default_factory=set)
    lock: object = field(default_factory=threading.RLock)

    def __enter__(self):
        self.real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, self._wrapped(name))
        return self

    def __exit__(self, *_):
        for name, call in self.real.items():
            setattr(os, name, call)

    def _wrapped(self, name):
        real = self.real[name]

        def call(first, *args, **kwargs):
            if not self._ours(first, kwargs) or (name == "open" and self._reads(first, *args)):
                return real(first, *args, **kwargs)
            self._count(name)
            if name in ("write", "pwrite"):
                with self.lock:
                    if self.count + 1 == self.at:
                        real(first, args[0][: len(args[0]) // 2], *args[1:])
                self._count(name)
            result = real(first, *args, **kwargs)
            if name == "open":
                self.descriptors.add(result)
            elif name == "close":
                self.descriptors.discard(first)
            return result

        return call

    @staticmethod
    def _reads(path, flags, mode=0o777):
        return not flags & os.O_CREAT and os.path.isfile(path)

    def _ours(self, first, kwargs):
        if isinstance(first, int):
            return first in self.descriptors
        inside = kwargs.get("dir_fd")
        return inside in self.descriptors if inside else str(first).startswith(self.root)

    def _count(self, name):
        if name not in self.only:
            return
        with self.lock:
            self.count += 1
            if self.count == self.at or (self.forever and self.count > self.at):
                self.happen(name)


class Stopped(BaseException):
    """Not caught by anything: the process or rank does nothing any more."""


class Interrupting:
    CHANGES = ("create", "make_folder", "rename", "remove", "sync_folder", "write", "close")
    READS = ("size", "list", "is_folder", "read_into")

    def __init__(self, inner, happen, operations=CHANGES, path=""):
        self._inner, self._happen = inner, happen
        self._operations, self._path = operations, path

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if name not in self._operations:
            return value

        def call(*args):
            path = self._path or args[0]
            self._happen(name, path)
            result = value(*args)
            if name == "create":
                return Interrupting(result, self._happen, self._operations, path)
            return result

        return call


def kill(_name):
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work) -> int:
    """The signal that ended a fork of this process which does ``work()``; 0 if it came back."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0
    return 0


def fill_disk(_name):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
