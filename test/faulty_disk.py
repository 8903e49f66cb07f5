"""A disk on which the n-th operation fails, or kills the process, and what is tried with it.

As a script, ``faulty_disk.py SCENARIO STRIDE FOLDER``: kills runs at every STRIDE-th operation and
at the last ones, and checks what is left each time. A process of its own, since it forks.
"""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path

from sharded_files import small_checkpoint

from xla_fsdp.consolidate import OutputError, consolidate_checkpoint, reshard_checkpoint
from xla_fsdp.consolidate.format.local import LocalStore


def counted(name):
    """The operation ``name`` of a store, counted by a FaultyDisk."""

    def operation(self, *paths):
        self.step()
        return getattr(LocalStore, name)(self, *paths)

    return operation


class FaultyDisk(LocalStore):
    """fault(n): called before operation n of those that change the disk, counted from 1.

    A write or removal at which it raises has half happened.
    """

    def __init__(self, fault=lambda number: None, swaps=True):
        self.fault, self.swaps, self.count = fault, swaps, 0

    def step(self, half=lambda: None):
        self.count += 1
        try:
            self.fault(self.count)
        except Die:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            half()
            raise

    def create(self, path):
        self.step()
        return FaultyOutput(super().create(path), self)

    make_folder, rename, replace, sync_folder = map(
        counted, ("make_folder", "rename", "replace", "sync_folder")
    )

    def exchange(self, one, other):
        self.step()
        return self.swaps and super().exchange(one, other)

    def remove(self, path):
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        self.step(lambda: super(FaultyDisk, self).remove(f"{path}/{names[0]}") if names else None)
        super().remove(path)


class FaultyOutput:
    def __init__(self, output, disk):
        self.output, self.disk = output, disk

    def write(self, data):
        self.disk.step(lambda: self.output.write(data[: len(data) // 2]))
        return self.output.write(data)

    def flush(self):
        self.output.flush()

    def write_at(self, begin, data):
        self.disk.step(lambda: self.output.write_at(begin, data[: len(data) // 2]))
        self.output.write_at(begin, data)

    def close(self):
        self.disk.step()
        self.output.close()

    def discard(self):
        self.output.discard()


class Die(Exception):
    """Kill the process here."""


def killed_at(number):
    def fault(count):
        if count == number:
            raise Die

    return fault


def full_at(number, forever=False):
    def fault(count):
        if count == number or (forever and count > number):
            raise OutputError(f"disk: cannot be written: {os.strerror(errno.ENOSPC)}")

    return fault


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
        self.names = {"old", "new", "work"}
        small_checkpoint(self.folder / "old", seed=1)
        small_checkpoint(self.folder / "new", seed=2)
        self.snapshots = {}
        for which in ("old", "new"):
            self.fresh()
            self.run(which, FaultyDisk())
            self.snapshots[which] = self.content()
        assert self.snapshots["old"] != self.snapshots["new"]

    @property
    def target(self):
        return self.folder / "work" / self.options["save_path"]

    def run(self, which, disk):
        options = {**self.options, "save_path": self.target, "disk": disk}
        if "world_size" in options:
            return reshard_checkpoint(self.folder / which, **options)
        return consolidate_checkpoint(self.folder / which, **options)

    def fresh(self):
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        (self.folder / "work").mkdir()

    def prepare(self):
        """The old result in its place, if there is to be one."""
        self.fresh()
        old = self.snapshots["old"] if self.existing else None
        if isinstance(old, dict):
            self.target.mkdir()
            for name, data in old.items():
                (self.target / name).write_bytes(data)
        elif old is not None:
            self.target.write_bytes(old)

    def steps(self, stride):
        """Numbers of the operations of a run: every ``stride``-th, and the last six."""
        self.prepare()
        disk = FaultyDisk(swaps=self.swaps)
        self.run("new", disk)
        return sorted({*range(1, disk.count + 1, stride), *range(disk.count - 5, disk.count + 1)})

    def content(self):
        """What is at the target: bytes by name, None if there is nothing."""
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
        """It ends, with all of the new result and nothing else."""
        result = self.run("new", FaultyDisk(swaps=self.swaps))
        assert self.content() == self.snapshots["new"]
        assert self.leftovers() == [self.target.name]
        return result


def kill_at_steps(scenario, stride):
    steps, resumed, up_to_date = scenario.steps(stride), 0, 0
    for number in steps:
        scenario.prepare()
        child = os.fork()
        if not child:
            try:
                scenario.run("new", FaultyDisk(killed_at(number), scenario.swaps))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (number, status)
        scenario.check_old_or_new()
        result = scenario.check_next_run()
        resumed += bool(result.resumed)
        up_to_date += result.up_to_date
    print(len(steps), resumed, up_to_date)


if __name__ == "__main__":
    kill_at_steps(Scenario(sys.argv[1], sys.argv[3]), int(sys.argv[2]))
