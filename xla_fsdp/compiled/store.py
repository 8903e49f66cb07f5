"""The files of compiled programs, kept between starts.

torch_xla writes a program straight into the file that it will look for, and reads what is there: a
process that is killed while it writes, or a flipped bit, would have the next one load a damaged
program, and one flipped byte was seen to change losses without a word. So torch_xla never sees the
kept files themselves::

    compiled/                            the store
      cpu-1f0c92ab44d0e871/              programs of one kind, that may run in each other's place
        about.json                         what the kind is
        8675...-582808-9be3...             a program: torch_xla's name, size and digest
        run-HOST-PID-XXXX/                 what torch_xla of one process sees
          8675...                            the same file (a hard link), checked before
        loading-HOST-PID                   that process has not loaded its first program yet

A process that ends before that may have died of it. The next one loads nothing, once.

A new program gets its digest and its name in the store once torch_xla has closed its file. Names in
the store appear in one step, so that any number of processes and hosts may use it at once.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from .files import Program, digest_of, entries_of, link, open_files, programs_in

_RUN = re.compile(r"run-(.+)-(\d+)-[^-]+")
_LOADING = re.compile(r"loading-(.+)-(\d+)")
_SECONDS_BETWEEN_LOOKS = 1.0
# Below this, a file that is shorter than it should be is likely.
_LEAST_FREE_BYTES = 64 << 20
_DAY = 24 * 3600.0  # seconds
_FORGET_RUNS_AFTER = 30 * _DAY


class Run:
    """What one process sees of the store, and adds to it, until the process ends.

    Attributes:
        folder: for torch_xla.
    """

    def __init__(self, kind: Path, began: Callable[[], bool]) -> None:
        self._kind, self._began = kind, began
        self.folder = Path(tempfile.mkdtemp(prefix=f"run-{_host()}-{os.getpid()}-", dir=kind))
        self._loading = kind / f"loading-{_host()}-{os.getpid()}"
        programs = [] if _died_while_loading(kind) else programs_in(kind)
        self._known = set(filter(None, map(self._take, programs)))
        if self._known:
            self._loading.touch()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="compiled-programs")
        self._thread.start()
        self._process = os.getpid()
        atexit.register(self.end)

    def keep_new(self) -> None:
        """Adds the programs to the store that torch_xla has finished writing."""
        new = [
            entry.path
            for entry in entries_of(self.folder)
            if (entry.name, entry.inode()) not in self._known
        ]
        if not new:
            return
        # Looked up after the files: one that is not open now has been closed, and it is not opened
        # again.
        unfinished = open_files()
        for path in map(Path, new):
            if str(path) not in unfinished:
                self._known.add((path.name, path.stat().st_ino))
                self._keep(path)

    def end(self) -> None:
        """Keeps what is new, and takes the folder away."""
        if os.getpid() != self._process:
            return  # a fork of the process
        self._ending.set()
        self._thread.join()
        atexit.unregister(self.end)
        self._loading.unlink(missing_ok=True)
        try:
            self.keep_new()
        except OSError:
            pass  # what is not kept is compiled again
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        # A process that is killed does not come to its end: keeps every program soon.
        while not self._ending.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                if self._began():
                    self._loading.unlink(missing_ok=True)
                self.keep_new()
            except OSError:
                pass

    def _take(self, program: Program) -> tuple[str, int] | None:
        # Read in full at every start: nothing else would notice what happened to it meanwhile.
        if not program.is_whole():
            program.path.unlink(missing_ok=True)
            return None
        path = self.folder / program.name
        try:
            link(program.path, path)
            return path.name, path.stat().st_ino
        except OSError:
            return None  # another process has removed it, or has another program of this name

    def _keep(self, path: Path) -> None:
        size = path.stat().st_size
        # torch_xla does not notice a full disk.
        if not size or shutil.disk_usage(self.folder).free < _LEAST_FREE_BYTES:
            return
        kept = self._kind / f"{path.name}-{size}-{digest_of(path)}"
        try:
            link(path, kept)
        except FileExistsError:
            return
        for other in self._kind.glob(f"{path.name}-*"):
            # torch_xla could not load that one, or another process was quicker.
            if other != kept:
                other.unlink(missing_ok=True)


def open_run(
    store: Path, name: str, about: Mapping[str, str], limit: int, began: Callable[[], bool]
) -> Run:
    """Starts a run on the programs of one kind.

    Args:
        store: created if need be.
        name: of the kind; ``about`` says in full what it is.
        limit: bytes that the store may take up. The oldest programs of all kinds are removed.
        began: whether this process has loaded, or compiled, a program.

    Raises:
        OSError: the store can not be written.
    """
    kind = store / name
    kind.mkdir(parents=True, exist_ok=True)
    _remove_dead_runs(store)
    _make_room(store, limit)
    kind.mkdir(exist_ok=True)  # may have been empty
    _write_about(kind, about)
    return Run(kind, began)


def _died_while_loading(kind: Path) -> bool:
    """Whether a process of this host ended before it had its first program. Forgets it."""
    found = False
    for entry in entries_of(kind):
        match = _LOADING.fullmatch(entry.name)
        # A container starts again with the same numbers: this process has no mark yet.
        if match and (_is_gone(match) or match.groups() == (_host(), str(os.getpid()))):
            Path(entry.path).unlink(missing_ok=True)
            found = True
    if found:
        warnings.warn(
            "the last start ended before its first program was loaded: compiling all of them "
            "again. Should that come back, train without the compilation cache",
            stacklevel=2,
        )
    return found


def _is_gone(match: re.Match[str]) -> bool:
    """Whether ``match``, of a host and a process, names a process of this host that has ended."""
    return match[1] == _host() and not Path("/proc", match[2]).exists()


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname())


def _make_room(store: Path, limit: int) -> None:
    aged = []
    for kind in store.iterdir():
        if kind.is_dir():
            for program in programs_in(kind):
                try:
                    aged.append((program.path.stat().st_mtime, program))
                except FileNotFoundError:
                    pass  # another process was here
    total = 0
    for _, program in sorted(aged, key=lambda pair: pair[0], reverse=True):
        total += program.size
        if total > limit:
            program.path.unlink(missing_ok=True)


def _remove_dead_runs(store: Path) -> None:
    for run in store.glob("*/run-*"):
        match = _RUN.fullmatch(run.name)
        if match is None:
            continue
        try:
            # Of other hosts nothing is known. A run that loses its folder only stops keeping.
            dead = _is_gone(match) or time.time() - run.stat().st_mtime > _FORGET_RUNS_AFTER
        except FileNotFoundError:
            continue
        if dead:
            shutil.rmtree(run, ignore_errors=True)
    for temporary in store.glob("*/*.tmp"):
        try:
            if time.time() - temporary.stat().st_mtime > _DAY:
                temporary.unlink()
        except FileNotFoundError:
            pass  # another process was here


def _write_about(kind: Path, about: Mapping[str, str]) -> None:
    path = kind / "about.json"
    if not path.exists():
        descriptor, temporary = tempfile.mkstemp(dir=kind, suffix=".tmp")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(dict(about), file, indent=1)
        os.replace(temporary, path)
