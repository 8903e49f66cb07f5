"""Chooses the path of the result, and checks that it may be written."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from ..errors import CheckpointError, OptionsError, OutputError
from ..format.store import join, read
from ..format.strict import read_json
from .disk import Disk
from .options import PTH, SAFETENSORS
from .write_plan import RECORD

_EXTENSIONS = {".safetensors": SAFETENSORS, ".pth": PTH, ".pt": PTH, ".bin": PTH}


@dataclass(frozen=True)
class Target:
    """The path of the result: one file, or a folder with files. ``format``: that of the files."""

    path: str
    is_folder: bool
    format: str

    @property
    def name(self) -> str | None:
        """Name of the file, None if the target is a folder."""
        return None if self.is_folder else os.path.basename(self.path)


def choose_target(
    prefix: str, sharded: bool, save_path: str, format: str | None, several: str
) -> Target:
    """Chooses the path and the format of the result.

    Args:
        prefix: path of the checkpoint, or prefix of per-rank files.
        sharded: whether it is a checkpoint folder.
        save_path: the path that the user wants, "" for the default.
        format: the format that the user wants, None for the default.
        several: name of the option that requires several files, "" if none does.

    Raises:
        OptionsError: path and options contradict each other.
    """
    path = save_path.rstrip("/") or save_path
    extension = _EXTENSIONS.get(os.path.splitext(path)[1].lower())
    chosen = format or extension or (SAFETENSORS if sharded else PTH)
    if not path:
        path = default_path(prefix.rstrip("/") if sharded else prefix, "_consolidated")
        return Target(path if several else f"{path}.{chosen}", bool(several), chosen)
    if extension is not None:
        if extension != chosen:
            raise OptionsError(
                f"{path}: is the name of a {extension} file, not of --format {chosen}. Change one "
                "of them."
            )
        if several:
            raise OptionsError(
                f"{path}: is a file, but {several} writes several files. Pass a folder instead."
            )
        return Target(path, False, chosen)
    # For per-rank files, the result has always been one torch file, with any name.
    is_file = not (sharded or several) and chosen == PTH
    return Target(path, not is_file, chosen)


def default_path(prefix: str, ending: str) -> str:
    """The default path of the result: ``prefix`` followed by ``ending``.

    Raises:
        OptionsError: the checkpoint is not on a local disk.
    """
    if "://" in prefix:
        raise OptionsError(f"{prefix}: is a URL. Pass a path on a local disk as --save_path.")
    return prefix + ending


def check_target(path: str, is_folder: bool, inputs: list[str], disk: Disk) -> None:
    """Checks that the target may be written, before any work is done.

    Raises:
        OutputError: the path is one of ``inputs``, a link, not of the right kind, in a folder that
            does not exist, or a folder with files that no earlier run has written.
    """
    if "://" in path:
        raise OutputError(f"{path}: is a URL, but results are written to local paths only")
    if os.path.basename(path) in ("", ".", ".."):
        raise OutputError(f"{path}: does not name a file or folder to write")
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        raise OutputError(f"{path}: directory {parent} does not exist. Make it first.")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error
    for source in inputs:
        # Compare files, not names: writing to a link to an input would also destroy the input.
        if os.path.exists(source) and os.path.exists(path) and os.path.samefile(path, source):
            raise OutputError(f"{path}: would overwrite the input {source}. Choose another path.")
    if stat.S_ISLNK(mode):
        raise OutputError(f"{path}: is a symbolic link. Remove it, or pass the path of its target.")
    if not is_folder:
        if stat.S_ISDIR(mode):
            raise OutputError(
                f"{path}: is a directory, expected the path of a file. Choose another path."
            )
        if not stat.S_ISREG(mode):
            raise OutputError(f"{path}: is not a regular file. Choose another path.")
        return
    if not stat.S_ISDIR(mode):
        raise OutputError(
            f"{path}: is a file, expected a folder. Remove it, or choose another path."
        )
    _require_own(path, disk)


def _require_own(folder: str, disk: Disk) -> None:
    """Checks that all files in a folder were written by an earlier run, as they will be removed."""
    try:
        names = set(disk.list(folder))
        own = _recorded(folder, disk) if RECORD in names else set()
    except CheckpointError as error:
        raise OutputError(f"{folder}: cannot be read: {error}") from error
    others = sorted(names - own - {RECORD})
    if others or (names and RECORD not in names):
        raise OutputError(
            f"{folder}: has {(others or [RECORD])[0]!r:.80}, which this command did not write and "
            "would remove. Choose another path, or move it away."
        )


def _recorded(folder: str, disk: Disk) -> set[str]:
    path = join(folder, RECORD)
    found = read_json(read(disk, path, 0, min(disk.size(path), 1 << 26)), path)
    files = found.get("files") if isinstance(found, dict) else None
    return {name for name in files if isinstance(name, str)} if isinstance(files, list) else set()
