"""Where the result goes, and whether it may."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from ..errors import CheckpointError, OptionsError, OutputError
from ..format.store import join, read
from ..format.strict import read_json
from .disk import Disk
from .options import PTH, SAFETENSORS
from .plan import RECORD

_EXTENSIONS = {".safetensors": SAFETENSORS, ".pth": PTH, ".pt": PTH, ".bin": PTH}


@dataclass(frozen=True)
class Target:
    """A place: of one file, or of a folder of files. format: what is written there."""

    path: str
    is_folder: bool
    format: str

    @property
    def name(self) -> str | None:
        """Of the one file, None if it is a folder."""
        return None if self.is_folder else os.path.basename(self.path)


def choose_target(
    prefix: str, sharded: bool, save_path: str, format: str | None, several: str
) -> Target:
    """``several``: the option that needs more than one file, "" if none does.

    Raises:
        OptionsError: path and options contradict each other.
    """
    path = save_path.rstrip("/") or save_path
    extension = _EXTENSIONS.get(os.path.splitext(path)[1].lower())
    chosen = format or extension or (SAFETENSORS if sharded else PTH)
    if not path:
        path = beside(prefix.rstrip("/") if sharded else prefix, "_consolidated")
        return Target(path if several else f"{path}.{chosen}", bool(several), chosen)
    if extension is not None:
        if extension != chosen:
            raise OptionsError(
                f"{path}: is the name of a {extension} file, not of --format {chosen}"
            )
        if several:
            raise OptionsError(
                f"{path}: {several} writes several files; give a folder to hold them"
            )
        return Target(path, False, chosen)
    # Per-rank files were always joined into one torch file, whatever its name.
    is_file = not (sharded or several) and chosen == PTH
    return Target(path, not is_file, chosen)


def beside(prefix: str, ending: str) -> str:
    """Where the result goes if nothing else is said.

    Raises:
        OptionsError: the checkpoint is on no local disk.
    """
    if "://" in prefix:
        raise OptionsError(f"{prefix}: --save_path must say where to write, on a local disk")
    return prefix + ending


def check_target(path: str, is_folder: bool, inputs: list[str], disk: Disk) -> None:
    """Refuses a place that cannot or should not be written, before any work is done.

    Raises:
        OutputError: it is one of ``inputs``, a link, of the wrong kind, in a folder that does not
            exist, or a folder with anything in it that was not written by an earlier run.
    """
    if "://" in path:
        raise OutputError(f"{path}: results are written to local paths only")
    if os.path.basename(path) in ("", ".", ".."):
        raise OutputError(f"{path}: does not name a file or folder to write")
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        raise OutputError(f"{path}: directory {parent} does not exist")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{path}: cannot be looked at: {error.strerror}") from error
    for source in inputs:
        # By identity, not name: a link to an input would be destroyed just the same.
        if os.path.exists(source) and os.path.exists(path) and os.path.samefile(path, source):
            raise OutputError(f"{path}: would overwrite the input {source}")
    if stat.S_ISLNK(mode):
        raise OutputError(f"{path}: is a symbolic link; remove it, or name what it points to")
    if not is_folder:
        if stat.S_ISDIR(mode):
            raise OutputError(f"{path}: is a directory, expected a file to write")
        if not stat.S_ISREG(mode):
            raise OutputError(f"{path}: is not a regular file; choose another name")
        return
    if not stat.S_ISDIR(mode):
        raise OutputError(f"{path}: is a file, expected a folder to write; remove it")
    _require_own(path, disk)


def _require_own(folder: str, disk: Disk) -> None:
    """A folder is replaced as a whole, so nothing else may be in it."""
    try:
        names = set(disk.list(folder))
        own = _recorded(folder, disk) if RECORD in names else set()
    except CheckpointError as error:
        raise OutputError(f"{folder}: cannot be looked at: {error}") from error
    others = sorted(names - own - {RECORD})
    if others or (names and RECORD not in names):
        raise OutputError(
            f"{folder}: holds {(others or [RECORD])[0]!r:.80}, which this command did not write, "
            "and would be replaced as a whole; choose another place, or move it away"
        )


def _recorded(folder: str, disk: Disk) -> set[str]:
    path = join(folder, RECORD)
    found = read_json(read(disk, path, 0, min(disk.size(path), 1 << 26)), path)
    files = found.get("files") if isinstance(found, dict) else None
    return {name for name in files if isinstance(name, str)} if isinstance(files, list) else set()
