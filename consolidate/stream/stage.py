"""Collects an incomplete result in a hidden folder, which replaces the target in one step.

The folder is ``.NAME.<identity>.partial`` in the folder of the target, which is called NAME. It
remains when a run is killed. The next run with the same options keeps its finished files; a run
with other options removes it. If the system cannot swap folders, an existing target folder is
called ``.NAME.replaced`` for a moment while it is replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from ..errors import CheckpointError, OutputError
from ..format.store import join
from .disk import Disk
from .target import check_target


class Stage:
    """The hidden folder of one target. As a context, it locks the folder for this process.

    Errors are OutputError. If an error ends the context, and no file is finished, the folder is
    removed.
    """

    def __init__(self, disk: Disk, target: str, identity: str):
        self.disk, self.target = disk, target
        self.parent, name = os.path.dirname(target) or ".", os.path.basename(target)
        self.folder = join(self.parent, f".{name}.{identity}.partial")
        self._replaced = join(self.parent, f".{name}.replaced")
        self._leftover = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.partial")
        self._lock: int | None = None
        self.finished: set[str] = set()

    def repair(self) -> None:
        """Restores a target that was renamed by a run which was killed before it replaced it."""
        if os.path.isdir(self._replaced) and not os.path.lexists(self.target):
            self.disk.rename(self._replaced, self.target)

    def sweep(self) -> None:
        """Removes the hidden folders of earlier runs for this target that are not running."""
        for name in sorted(self.disk.list(self.parent)):
            path = join(self.parent, name)
            if self._lock is not None and path == self.folder:
                continue
            if self._leftover.fullmatch(name) and os.path.isdir(path) and not os.path.islink(path):
                try:
                    lock = self.disk.lock(path)
                except OutputError:
                    continue
                try:
                    self.disk.remove(path)
                finally:
                    os.close(lock)
        if os.path.lexists(self.target):
            self.disk.remove(self._replaced)

    def __enter__(self) -> Stage:
        self.disk.make_folder(self.folder)
        self._lock = self.disk.lock(self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and not self.finished:
                with contextlib.suppress(CheckpointError):
                    self.disk.remove(self.folder)
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def produce(
        self,
        is_folder: bool,
        inputs: list[str],
        is_there: Callable[[], bool],
        build: Callable[[], int],
    ) -> tuple[bool, int]:
        """Calls ``build`` inside the context, unless ``is_there`` finds that the result exists.

        Returns whether the result existed, and the result of ``build`` or 0.
        """
        self.repair()
        check_target(self.target, is_folder, inputs, self.disk)
        if is_there():
            with contextlib.suppress(OutputError):  # the result is complete anyway
                self.sweep()
            return True, 0
        with self:
            self.sweep()
            return False, build()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """A context that gives the path of a file to write.

        After an error the file is removed; otherwise it is marked as finished.
        """
        try:
            yield self.path(name)
        except CheckpointError:
            with contextlib.suppress(OutputError):
                self.disk.remove(self.path(name))
            raise
        self.finished.add(name)

    def path(self, name: str) -> str:
        """The path of a file in the folder."""
        return join(self.folder, name)

    def keep_only(self, names: Iterable[str]) -> None:
        """Removes all files from the folder except ``names``."""
        names = set(names)
        for name in self.disk.list(self.folder):
            if name not in names:
                self.disk.remove(self.path(name))

    def write_text(self, name: str, data: bytes) -> None:
        """Writes a small file, durable when this returns."""
        self.disk.remove(self.path(name))
        output = self.disk.create(self.path(name))
        try:
            output.write(data)
            output.close()
        except BaseException:
            output.discard()
            raise

    def require_space(self, needed: int) -> None:
        """Raises OutputError if the disk has less than ``needed`` bytes free."""
        try:
            free = shutil.disk_usage(self.parent).free
        except OSError:
            return
        if free < needed:
            raise OutputError(
                f"{self.target}: cannot be written: needs {needed} bytes, but {free} are free on "
                "this disk. Free some space, or write to another disk."
            )

    def commit_file(self, name: str) -> None:
        """Replaces the target by the only file of the result."""
        self.disk.sync_folder(self.folder)
        self.disk.replace(self.path(name), self.target)
        self._discard(self.folder)

    def commit_folder(self) -> None:
        """Replaces the target by the folder. An existing target folder is removed."""
        self.disk.sync_folder(self.folder)
        if not os.path.lexists(self.target):
            self.disk.rename(self.folder, self.target)
        elif self.disk.exchange(self.folder, self.target):
            self._discard(self.folder)
        else:
            self.disk.remove(self._replaced)
            self.disk.rename(self.target, self._replaced)
            self.disk.rename(self.folder, self.target)
            self._discard(self._replaced)

    def _discard(self, path: str) -> None:
        # The result is complete. The next run removes what cannot be removed now.
        with contextlib.suppress(OutputError):
            self.disk.remove(path)
