"""Writes a result into ``.NAME.<identity>.partial``, a folder which replaces the target NAME.

The next run with the same options continues there; one with other options removes it. If the system
cannot swap folders, an existing target is called ``.NAME.replaced`` for a moment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from ..errors import CheckpointError, OutputError
from ..format.local import FolderLock, LocalStore
from ..format.store import content_equals, join, read, write
from ..format.strict import read_json
from .plan import RECORD, WritePlan
from .result_file import ResultFile

_DISK = LocalStore()
# Called with the number of bytes since the last call.
ProgressContext = AbstractContextManager[Callable[[int], object]]


@contextlib.contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


def write_result(
    plan: WritePlan,
    target: str,
    inputs: list[str],
    progress: Callable[[str, int], ProgressContext] = silent,
) -> tuple[bool, int]:
    """Writes the result and replaces the target. Raises OutputError.

    Returns whether the result existed already, and the number of files kept of an earlier run.
    """
    stage = _Stage(target, plan.identity)
    if os.path.isdir(stage.replaced) and not os.path.lexists(target):
        _DISK.rename(stage.replaced, target)  # a killed run had renamed it, and not replaced
    check_target(target, plan.is_folder, inputs)
    if _is_up_to_date(plan, target, progress):
        with contextlib.suppress(OutputError):  # the result is complete anyway
            stage.sweep()
        return True, 0
    with stage.locked():
        stage.sweep()
        kept = stage.fill(plan, progress)
        stage.commit(plan)
    return False, kept


def _is_up_to_date(
    plan: WritePlan, target: str, progress: Callable[[str, int], ProgressContext]
) -> bool:
    folder = target if plan.is_folder else os.path.dirname(target)

    def same(texts: Mapping[str, bytes]) -> bool:
        return all(content_equals(_DISK, join(folder, n), data) for n, data in texts.items())

    try:
        if not os.path.lexists(target) or not same(plan.texts):
            return False
        digests = _digests_of_files(plan.files, folder, progress)
        if len(digests) < len(plan.files):
            return False
        more = plan.make_texts(list(digests.values()))
        names = digests.keys() | plan.texts.keys() | more.keys()
        return same(more) and (not plan.is_folder or set(_DISK.list(folder)) == names)
    except CheckpointError:
        return False


def _digests_of_files(
    files: Sequence[ResultFile], folder: str, progress: Callable[[str, int], ProgressContext]
) -> dict[str, str]:
    """The digests of those ``files`` that are in ``folder``, complete and right."""
    with progress("check", sum(file.nbytes for file in files)) as bar:
        found = {file.name: file.check(join(folder, file.name), bar) for file in files}
    return {name: digests for name, digests in found.items() if digests is not None}


class _Stage:
    def __init__(self, target: str, identity: str):
        self.target = target
        self.parent, name = os.path.dirname(target) or ".", os.path.basename(target)
        self.folder = join(self.parent, f".{name}.{identity}.partial")
        self.replaced = join(self.parent, f".{name}.replaced")
        self._leftover = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.partial")
        self._is_locked = False

    def sweep(self) -> None:
        """Removes the hidden folders of runs for this target that are not running."""
        for name in sorted(_DISK.list(self.parent)):
            path = join(self.parent, name)
            if self._is_locked and path == self.folder:
                continue
            if self._leftover.fullmatch(name) and os.path.isdir(path) and not os.path.islink(path):
                with contextlib.suppress(OSError), contextlib.closing(FolderLock(path)):
                    _DISK.remove(path)
        if os.path.lexists(self.target):
            _DISK.remove(self.replaced)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes and locks the folder. At the end, removes it if it is empty."""
        _DISK.make_folder(self.folder)
        try:
            lock = FolderLock(self.folder)
        except BlockingIOError as error:
            raise OutputError(
                f"{self.folder}: another run is writing there. Wait until it has finished."
            ) from error
        except OSError as error:
            raise OutputError(f"{self.folder}: cannot be written: {error.strerror}") from error
        self._is_locked = True
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
            lock.close()

    def fill(self, plan: WritePlan, progress: Callable[[str, int], ProgressContext]) -> int:
        """Writes all files of the plan. Returns the number that existed."""
        names, present = {file.name for file in plan.files}, set(_DISK.list(self.folder))
        for name in present - names:
            _DISK.remove(join(self.folder, name))
        old = [file for file in plan.files if file.name in present]
        digests = _digests_of_files(old, self.folder, progress)
        kept = len(digests)
        missing = [file for file in plan.files if file.name not in digests]
        for file in missing:
            _DISK.remove(join(self.folder, file.name))
        total = sum(file.nbytes for file in missing)
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self.parent).free
            if free < total:
                raise OutputError(
                    f"{self.target}: cannot be written: needs {total} bytes, but {free} are free "
                    "on this disk. Free some space, or write to another disk."
                )
        with progress("write", total) as bar:
            for file in missing:
                path = join(self.folder, file.name)
                try:
                    digests[file.name] = file.write(path, bar)
                except BaseException:
                    with contextlib.suppress(OutputError):
                        _DISK.remove(path)
                    raise
        more = plan.make_texts([digests[file.name] for file in plan.files])
        for name, data in {**plan.texts, **more}.items():
            write(_DISK, join(self.folder, name), data)
        return kept

    def commit(self, plan: WritePlan) -> None:
        _DISK.sync_folder(self.folder)
        rest = self.folder
        if not plan.is_folder:
            _DISK.replace(join(self.folder, plan.files[0].name), self.target)
        elif not os.path.lexists(self.target):
            _DISK.rename(self.folder, self.target)
            return
        elif not _DISK.exchange(self.folder, self.target):
            rest = self.replaced
            _DISK.remove(rest)
            _DISK.rename(self.target, rest)
            _DISK.rename(self.folder, self.target)
        # The next run removes what cannot be removed now.
        with contextlib.suppress(OutputError):
            _DISK.remove(rest)


def check_target(path: str, is_folder: bool, inputs: list[str]) -> None:
    """Checks that the target may be written. Raises OutputError.

    It may not be one of ``inputs``, a link, of the wrong kind, or in a folder that does not exist.
    """
    if "://" in path:
        raise OutputError(f"{path}: is a URL, but results are written to local paths only")
    if os.path.basename(path) in ("", ".", ".."):
        raise OutputError(f"{path}: does not name a file or folder to write")
    parent = os.path.dirname(path) or "."
    try:
        os.stat(os.path.join(parent, ""))
    except FileNotFoundError as error:
        raise OutputError(f"{path}: directory {parent} does not exist. Make it first.") from error
    except OSError as error:
        raise OutputError(
            f"{path}: directory {parent} cannot be read: {error.strerror}. Choose another path."
        ) from error
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error
    for source in inputs:
        # One may be a link to the other.
        if os.path.exists(source) and os.path.exists(path) and os.path.samefile(path, source):
            raise OutputError(f"{path}: would overwrite the input {source}. Choose another path.")
    wrong = ""
    if stat.S_ISLNK(mode):
        wrong = "is a symbolic link. Remove it, or pass the path of its target."
    elif is_folder and not stat.S_ISDIR(mode):
        wrong = "is a file, expected a folder. Remove it, or choose another path."
    elif not is_folder and stat.S_ISDIR(mode):
        wrong = "is a directory, expected the path of a file. Choose another path."
    elif not is_folder and not stat.S_ISREG(mode):
        wrong = "is not a regular file. Choose another path."
    if wrong:
        raise OutputError(f"{path}: {wrong}")
    if is_folder:
        _require_own(path)


def _require_own(folder: str) -> None:
    """Checks that an earlier run wrote all files in a folder: they will be removed."""
    try:
        names = set(_DISK.list(folder))
        own = _recorded(folder) if RECORD in names else set()
    except CheckpointError as error:
        raise OutputError(f"{folder}: cannot be read: {error}") from error
    others = sorted(names - own - {RECORD})
    if others or (names and RECORD not in names):
        raise OutputError(
            f"{folder}: has {(others or [RECORD])[0]!r:.80}, which this command did not write and "
            "would remove. Choose another path, or move it away."
        )


def _recorded(folder: str) -> set[str]:
    path = join(folder, RECORD)
    found = read_json(read(_DISK, path, 0, min(_DISK.size(path), 1 << 26)), path)
    files = found.get("files") if isinstance(found, dict) else None
    return {name for name in files if isinstance(name, str)} if isinstance(files, list) else set()
