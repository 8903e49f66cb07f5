"""Files of compiled programs whose names tell what must be in them."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import xxhash

_KEPT = re.compile(r"(\d+)-(\d+)-([0-9a-f]{32})")


@dataclass(frozen=True)
class Program:
    """A file of the store, as its name says it is."""

    path: Path
    name: str  # torch_xla's
    size: int
    digest: str

    @classmethod
    def at(cls, path: Path) -> Program | None:
        match = _KEPT.fullmatch(path.name)
        return cls(path, match[1], int(match[2]), match[3]) if match else None

    def is_whole(self) -> bool:
        try:
            return self.path.stat().st_size == self.size and digest_of(self.path) == self.digest
        except OSError:
            return False


def entries_of(folder: Path) -> list[os.DirEntry]:
    """What is in ``folder``; nothing if it is gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def programs_in(kind: Path) -> list[Program]:
    """The programs in a folder of the store, not looked at yet."""
    found = (Program.at(Path(entry.path)) for entry in entries_of(kind))
    return [program for program in found if program is not None]


def digest_of(path: Path) -> str:
    """For damage, not for malice: who writes to the store can write digests too."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def link(source: Path, target: Path) -> None:
    """Gives a file a second name, in one step.

    Raises:
        OSError: ``target`` is there already, or ``source`` no more.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if not source.exists():
            raise
        # A file system without hard links.
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        os.close(descriptor)
        try:
            shutil.copyfile(source, temporary)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def open_files() -> set[str]:
    """Paths of the files that this process has open."""
    found = set()
    for entry in entries_of(Path("/proc/self/fd")):
        try:
            found.add(os.readlink(entry.path))
        except OSError:
            pass  # closed meanwhile
    return found
