"""Results in the making: a hidden folder beside the target, then the target, in one step.

``.NAME.<identity>.partial``, NAME being the target's. It survives whatever ends a run; the next run
with the same options keeps the files in it that are finished, any other run removes it. A folder
being replaced where the system cannot swap is ``.NAME.replaced`` for a moment.
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
    """The folder in the making of one target; a context, within which it belongs to this process.

    Errors are OutputError. When an error ends the context, a folder without any finished file is
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
        """Puts back a target that a run was about to replace when it was killed."""
        if os.path.isdir(self._replaced) and not os.path.lexists(self.target):
            self.disk.rename(self._replaced, self.target)

    def sweep(self) -> None:
        """Removes what earlier runs for this target left behind, unless they are still running."""
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
        """Whether the result is in its place already, else what ``build``, called within the
        context, returns."""
        self.repair()
        check_target(self.target, is_folder, inputs, self.disk)
        if is_there():
            with contextlib.suppress(OutputError):  # it is none of the result
                self.sweep()
            return True, 0
        with self:
            self.sweep()
            return False, build()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Gives the path of a file; one whose writing fails is removed, else it is finished."""
        try:
            yield self.path(name)
        except CheckpointError:
            with contextlib.suppress(OutputError):
                self.disk.remove(self.path(name))
            raise
        self.finished.add(name)

    def path(self, name: str) -> str:
        """Of a file in the folder."""
        return join(self.folder, name)

    def keep_only(self, names: Iterable[str]) -> None:
        """Removes everything else from the folder."""
        names = set(names)
        for name in self.disk.list(self.folder):
            if name not in names:
                self.disk.remove(self.path(name))

    def write_text(self, name: str, data: bytes) -> None:
        """A small file, durable when this returns."""
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
                f"{self.target}: cannot be written: needs {needed} bytes, {free} are free on this "
                "disk"
            )

    def commit_file(self, name: str) -> None:
        """Puts the one file in the target's place, over what is there."""
        self.disk.sync_folder(self.folder)
        self.disk.replace(self.path(name), self.target)
        self._discard(self.folder)

    def commit_folder(self) -> None:
        """Puts the folder in the target's place. What was there is removed."""
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
        # The result is in place: what cannot be removed now is removed by the next run.
        with contextlib.suppress(OutputError):
            self.disk.remove(path)
