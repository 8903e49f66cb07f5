"""A disk on which the n-th system call fails, or kills the process, and what is tried with it.

As a script, ``faulty_disk.py SCENARIO STRIDE FOLDER``: kills runs at every STRIDE-th call and at
the last ones, and checks what is left each time. A process of its own, since it forks.
"""

import contextlib
import errno
import os
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from sharded_files import small_checkpoint

from xla_fsdp.consolidate import consolidate_checkpoint, reshard_checkpoint
from xla_fsdp.consolidate.format.local import LocalStore

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
    """A store in which something happens before each operation, with its name and path."""

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


# By name: what is written, whether something was there before, whether folders can be swapped.
SCENARIOS = {
    "safetensors file": (dict(save_path="m.safetensors"), True, True),
    "torch file": (dict(save_path="m.pth"), True, True),
    "new folder": (dict(save_path="out", optimizer=True, max_shard_size="4KB"), False, True),
    "folder": (dict(save_path="out", optimizer=True, max_shard_size="4KB"), True, True),
    "folder, no swap": (dict(save_path="out", optimizer=True), True, False),
    "reshard": (dict(save_path="out", world_size=2), True, True),
    "reshard, no swap": (dict(save_path="out", world_size=2), True, False),
}


class Scenario:
    """A folder with two checkpoints; the result of the first is to be replaced by the second's."""

    def __init__(self, name, folder):
        self.options, self.existing, self.swaps = SCENARIOS[name]
        self.folder = Path(folder)
        small_checkpoint(self.folder / "old", seed=1)
        small_checkpoint(self.folder / "new", seed=2)
        self.snapshots = {}
        for which in ("old", "new"):
            self.fresh()
            self.run(which)
            self.snapshots[which] = self.content()
        assert self.snapshots["old"] != self.snapshots["new"]

    @property
    def target(self):
        return self.folder / "work" / self.options["save_path"]

    def run(self, which):
        options = {**self.options, "save_path": self.target}
        write = reshard_checkpoint if "world_size" in options else consolidate_checkpoint
        no_swap = mock.patch.object(LocalStore, "exchange", return_value=False)
        with contextlib.nullcontext() if self.swaps else no_swap:
            return write(self.folder / which, **options)

    def boundaries(self, at=0, happen=None, **options):
        return Boundaries(str(self.folder / "work"), at, happen, **options)

    def fresh(self):
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        (self.folder / "work").mkdir()

    def prepare(self):
        self.fresh()
        old = self.snapshots["old"] if self.existing else None
        if isinstance(old, dict):
            self.target.mkdir()
            for name, data in old.items():
                (self.target / name).write_bytes(data)
        elif old is not None:
            self.target.write_bytes(old)

    def steps(self, stride, only=CALLS):
        """Numbers of the calls of a run: every ``stride``-th, and the last twelve."""
        self.prepare()
        with self.boundaries(only=only) as calls:
            self.run("new")
        last = calls.count + 1
        return sorted({*range(1, last, stride), *range(last - 12, last)})

    def content(self):
        if self.target.is_dir():
            return {path.name: path.read_bytes() for path in self.target.iterdir()}
        return self.target.read_bytes() if self.target.exists() else None

    def check_old_or_new(self):
        found = self.content()
        allowed = [self.snapshots["new"], self.snapshots["old"] if self.existing else None]
        if self.existing and not self.swaps:
            allowed.append(None)  # for a moment; the next run repairs it
        assert found in allowed, self.leftovers()

    def leftovers(self):
        return sorted(path.name for path in (self.folder / "work").iterdir())

    def check_next_run(self):
        result = self.run("new")
        assert self.content() == self.snapshots["new"]
        assert self.leftovers() == [self.target.name]
        return result


def kill_at_steps(scenario, stride):
    steps, resumed, up_to_date = scenario.steps(stride), 0, 0
    for number in steps:
        scenario.prepare()

        def work(number=number):
            with scenario.boundaries(number, kill):
                scenario.run("new")

        assert in_child(work) == signal.SIGKILL, number
        scenario.check_old_or_new()
        result = scenario.check_next_run()
        resumed += bool(result.resumed)
        up_to_date += result.up_to_date
    print(len(steps), resumed, up_to_date)


if __name__ == "__main__":
    kill_at_steps(Scenario(sys.argv[1], sys.argv[3]), int(sys.argv[2]))
