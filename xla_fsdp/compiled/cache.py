"""Stores compiled programs on disk, in files that are checked: docs/how-to/compilation-cache.md.

torch_xla 2.9 writes such files, but cannot load them and does not check them. So it gets checked
hard links to the files of a store::

    compiled/                            the store
      cpu-1f0c92ab44d0e871/              programs of one kind: of the same versions, flags, ...
        about.json                         the properties of the kind
        8675...-582808-9be3...             a program: torch_xla's name, size and digest
        run-HOST-PID-XXXX/                 the folder that torch_xla of one process uses
          8675...                            a hard link to a program, which was checked
        loading-HOST-PID                   that process has not loaded its first program yet
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import platform
import re
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
import xxhash

from .. import xlac
from ..compiler_options import libtpu_init_args
from ..extras import installed_versions
from ..files import default_cache_folder
from ..tpu.libtpu_flags import ARGUMENTS

# "PID:FOLDER": the store of the process PID.
_STORE = "XLA_FSDP_COMPILATION_CACHE"
# torch_xla's cache reads these when it is created.
_TORCH_XLA = ("XLA_PERSISTENT_CACHE_PATH", "XLA_PERSISTENT_CACHE_READ_ONLY")
_REMOVED = "XLA_FSDP_COMPILATION_CACHE_FOLDER"
_LIMIT = 8 << 30
# Increase it when the format of the store changes.
_FORMAT = "1"
_PROGRAM_FILE = re.compile(r"(\d+)-(\d+)-([0-9a-f]{32})")
_RUN = re.compile(r"run-(.+)-(\d+)-[^-]+")
_LOADING = re.compile(r"loading-(.+)-(\d+)")
_SECONDS_BETWEEN_LOOKS = 1.0
# With less free space, torch_xla may write incomplete files.
_LEAST_FREE_BYTES = 64 << 20
_DAY = 24 * 3600.0  # seconds
_FORGET_RUNS_AFTER = 30 * _DAY
_opening = threading.Lock()


class CompilationCounts(NamedTuple):
    """How many programs this process has compiled, and loaded from the cache."""

    compiled: int
    cached: int


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> Path:
    """Stores compiled programs in a folder, and loads those that are there instead of compiling.

    Call it in the main program before :func:`launch`, and before anything uses an XLA device; under
    ``torchrun`` in each process. Programs are only loaded undamaged, with the same versions, flags
    and kind of processor. Any number of processes may share a folder. It grows to at most 8 GiB; a
    start removes the oldest programs.

    Args:
        path: the folder, created if it does not exist; ``None``: ``xla_fsdp/compiled`` in
            ``$XDG_CACHE_HOME``, or in ``~/.cache``.

    Returns:
        The folder.

    Raises:
        ValueError: ``path`` is empty.
        RuntimeError: XLA's runtime was started before, or another folder is in use.
        NotImplementedError: this torch_xla or machine does not support it.
        OSError: the folder cannot be created or written; or any user can write there, which is
            unsafe, because the programs in it are run.
    """
    if isinstance(path, str) and not path.strip():
        raise ValueError(f"path must name a folder, or be None for the default one; got {path!r}")
    folder = Path(path or default_cache_folder("compiled")).absolute()
    used = _folder_in_use()
    if used == str(folder):
        return folder
    if used is not None:
        raise RuntimeError(f"this process keeps its compiled programs in {used} already")
    if xlac.runtime_has_started() or xlac.compilation_cache_exists():
        raise RuntimeError(
            "enable_compilation_cache was called after XLA's runtime had started; call it in the "
            "main program before launch and before anything touches an XLA device"
        )
    part = "0 of 1"
    if dist.is_torchelastic_launched():
        part = f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    _open_cache(folder, part)
    os.environ[_STORE] = f"{os.getpid()}:{folder}"
    return folder


def refuse_removed_cache_variable() -> None:
    """Raises ValueError if the environment names a folder, an option that was removed."""
    folder = os.environ.get(_REMOVED, "").strip()
    if folder not in ("", "none") and _folder_in_use() is None:
        raise ValueError(
            f"{_REMOVED}={folder} has no effect any more: launch caches no programs by default. "
            "Unset it, and call xla_fsdp.enable_compilation_cache(folder) before launch"
        )


def compilation_counts() -> CompilationCounts:
    """How many programs this process has compiled and loaded."""
    return CompilationCounts(
        met.counter_value("UncachedCompile") or 0, met.counter_value("PersistentCacheHit") or 0
    )


def in_spawned_processes(fn: Callable) -> Callable:
    """``fn`` for new processes, which then use this process's folder."""
    folder = _folder_in_use()
    return fn if folder is None else partial(_with_store, folder, fn)


def _folder_in_use() -> str | None:
    process, _, folder = os.environ.get(_STORE, "").partition(":")
    return folder if process == str(os.getpid()) else None


def _with_store(folder: str, fn: Callable, *args: Any) -> Any:
    with _opening:  # TPU v2 and v3 run two ranks in a process
        if not xlac.compilation_cache_exists():
            try:
                _open_cache(Path(folder), f"{xr.process_index()} of {xr.process_count()}")
            except (OSError, NotImplementedError) as error:
                warnings.warn(f"no compilation cache in this process: {error}", stacklevel=2)
    return fn(*args)


def _open_cache(folder: Path, part: str) -> None:
    on = platform_of_ranks()
    if on not in xlac.CLIENTS:
        raise NotImplementedError(f"programs of PJRT_DEVICE={on} are not kept; CPU and TPU are")
    repair_client(on)
    about = describe_kind(on, part)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mode & stat.S_IWOTH:
            raise PermissionError(
                errno.EPERM, "anybody can put programs there, which you would run"
            )
        kind = f"{on.lower()}-{digest[:16]}"
        run = open_session(folder.resolve(), kind, about)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"compiled programs cannot be kept in {folder} ({error.strerror}); name a folder of "
            "your own, with space left",
        ) from error
    # Replaces the user's folder, whose files would not be checked.
    xr.initialize_cache(str(run.folder), readonly=False)
    xr.get_num_cached_compilation_graph()  # does not start the runtime
    for name in _TORCH_XLA:
        os.environ.pop(name, None)  # child processes may not use its folder


def platform_of_ranks() -> str:
    """That of ``PJRT_DEVICE``, "CPU" or "TPU"; if it is not set, sets it by this host's chips."""
    # torch_xla sets it on import, but it may have been removed.
    if not xr.device_type():
        os.environ["PJRT_DEVICE"] = "TPU" if xlac.chips_of_host() > 0 else "CPU"
    return str(xr.device_type())


def describe_kind(on: str, part: str) -> dict[str, str]:
    """The properties of a kind; torch_xla's key does not contain versions and processor.

    ``part``: this process among those that run one program.
    """
    about = {
        "format": _FORMAT,
        "platform": on,
        "machine": platform.machine(),
        # On a TPU each process compiles for its own devices.
        "process": part if on == "TPU" else "any",
        ARGUMENTS: libtpu_init_args(os.environ.get(ARGUMENTS, "")),
        "TPU_LIBRARY_PATH": os.environ.get("TPU_LIBRARY_PATH", ""),
        "TPU_MEGACORE": os.environ.get("TPU_MEGACORE", ""),
    }
    about |= installed_versions("torch", "torch_xla", "libtpu")
    del about["python"]  # programs do not depend on it
    if on == "CPU":
        about["processor"] = _processor()
    for name, value in sorted(os.environ.items()):
        if name.startswith("XLA_") and name not in (_STORE, *_TORCH_XLA):
            about[name] = value
    return about


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first = file.read().partition("\n\n")[0]
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = " ".join(sorted(fields.get("flags", fields.get("Features", "")).split()))
    names = [fields[name] for name in ("model name", "cpu family", "model") if name in fields]
    return f"{' / '.join(names)}, {hashlib.sha256(flags.encode()).hexdigest()}"


@dataclass(frozen=True)
class StoredProgram:
    path: Path
    name: str  # torch_xla's
    size: int
    digest: str


def _entries_of(folder: Path) -> list[os.DirEntry]:
    """Empty if the folder does not exist any more."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _programs_in(kind: Path) -> list[StoredProgram]:
    named = ((Path(entry.path), _PROGRAM_FILE.fullmatch(entry.name)) for entry in _entries_of(kind))
    return [StoredProgram(path, one[1], int(one[2]), one[3]) for path, one in named if one]


def _digest_of(path: Path) -> str:
    """Detects damage, but no attacks: who can write to the store can write digests too."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name, in one step. Raises OSError if ``target`` exists."""
    try:
        os.link(source, target)
    except OSError as error:
        if isinstance(error, FileExistsError) or not source.exists():
            raise
        # A file system without hard links.
        _write_at_once(target, lambda temporary: shutil.copyfile(source, temporary))


def _write_at_once(path: Path, write: Callable[[str], object]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(descriptor)
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class CacheSession:
    """One process's programs from and for the store; torch_xla uses ``folder``."""

    def __init__(self, kind: Path, began: Callable[[], bool]) -> None:
        self._kind, self._began = kind, began
        self.folder = Path(tempfile.mkdtemp(prefix=f"run-{_host_name()}-{os.getpid()}-", dir=kind))
        self._loading = kind / f"loading-{_host_name()}-{os.getpid()}"
        programs = [] if _died_while_loading(kind) else _programs_in(kind)
        self._known = set(filter(None, map(self._take, programs)))
        if self._known:
            self._loading.touch()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="compiled-programs")
        self._thread.start()
        self._process = os.getpid()
        atexit.register(self.end)

    def keep_new(self) -> None:
        """Stores the programs that torch_xla has finished writing."""
        there = _entries_of(self.folder)
        new = [entry for entry in there if (entry.name, entry.inode()) not in self._known]
        # Listed before: torch_xla opens a file once, so one that is not open is complete.
        opened = _entries_of(Path("/proc/self/fd")) if new else []
        unfinished = set(map(os.path.realpath, opened))
        for entry in new:
            if entry.path not in unfinished:
                self._known.add((entry.name, entry.inode()))
                self._keep(Path(entry.path))

    def end(self) -> None:
        if os.getpid() != self._process:
            return  # a fork
        self._ending.set()
        self._thread.join()
        atexit.unregister(self.end)
        self._loading.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # they are compiled again
            self.keep_new()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        # A process that is killed does not call ``end``.
        while not self._ending.wait(_SECONDS_BETWEEN_LOOKS):
            with contextlib.suppress(OSError):
                if self._began():
                    self._loading.unlink(missing_ok=True)
                self.keep_new()

    def _take(self, program: StoredProgram) -> tuple[str, int] | None:
        path, size = program.path, program.size
        target = self.folder / program.name
        try:
            # It may have been damaged since the last start.
            if path.stat().st_size != size or _digest_of(path) != program.digest:
                path.unlink(missing_ok=True)
                return None
            _link(path, target)
            return target.name, target.stat().st_ino
        except OSError:
            return None  # another process was faster

    def _keep(self, path: Path) -> None:
        size = path.stat().st_size
        # torch_xla does not notice a full disk.
        if not size or shutil.disk_usage(self.folder).free < _LEAST_FREE_BYTES:
            return
        kept = self._kind / f"{path.name}-{size}-{_digest_of(path)}"
        try:
            _link(path, kept)
        except FileExistsError:
            return
        for other in self._kind.glob(f"{path.name}-*"):
            # torch_xla could not load that one, or another process has stored it meanwhile.
            if other != kept:
                other.unlink(missing_ok=True)


def open_session(
    store: Path,
    name: str,
    about: Mapping[str, str],
    limit: int = _LIMIT,
    began: Callable[[], bool] = lambda: any(compilation_counts()),
) -> CacheSession:
    """Starts a run with the programs of the kind ``name``, which has the properties ``about``.

    Removes the oldest programs until all kinds have at most ``limit`` bytes. ``began``: whether
    this process has a program. Raises OSError if the store cannot be written.
    """
    kind = store / name
    kind.mkdir(parents=True, exist_ok=True)
    _remove_dead_runs(store)
    _make_room(store, limit)
    kind.mkdir(exist_ok=True)  # may have been empty
    if not (kind / "about.json").exists():
        text = json.dumps(dict(about), indent=1)
        _write_at_once(kind / "about.json", lambda path: Path(path).write_text(text))
    return CacheSession(kind, began)


def _died_while_loading(kind: Path) -> bool:
    """Whether a process of this host ended before its first program; removes its mark."""
    found = False
    for entry in _entries_of(kind):
        match = _LOADING.fullmatch(entry.name)
        # In a restarted container, this process may have the same number.
        if match and (_is_gone(match) or match.groups() == (_host_name(), str(os.getpid()))):
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
    return match[1] == _host_name() and not Path("/proc", match[2]).exists()


def _host_name() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname())


def _make_room(store: Path, limit: int) -> None:
    aged = {}
    for kind in filter(Path.is_dir, store.iterdir()):
        for program in _programs_in(kind):
            with contextlib.suppress(FileNotFoundError):
                aged[program] = program.path.stat().st_mtime
    total = 0
    for program in sorted(aged, key=aged.__getitem__, reverse=True):
        total += program.size
        if total > limit:
            program.path.unlink(missing_ok=True)


def _remove_dead_runs(store: Path) -> None:
    for path in (*store.glob("*/run-*"), *store.glob("*/*.tmp")):
        with contextlib.suppress(FileNotFoundError):
            age = time.time() - path.stat().st_mtime
            run = _RUN.fullmatch(path.name)
            # Other hosts' processes are unknown; without a folder they only store no more.
            if run and (_is_gone(run) or age > _FORGET_RUNS_AFTER):
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".tmp" and age > _DAY:
                path.unlink()


# torch_xla calls ``DeserializeExecutable``, then ``Load``. Clients return "UNIMPLEMENTED" from both
# (github.com/pytorch/xla/issues/9094, open), but ``LoadSerializedExecutable`` does both. So two
# entries of the table of virtual functions are replaced: the first becomes that function, the
# second returns the first's result.


def repair_client(platform_name: str) -> None:
    """Makes the client of ``platform_name``, CPU or TPU, able to load programs.

    Call it before XLA's runtime starts. Raises NotImplementedError on other systems.
    """
    found = version("torch_xla")
    if not found.startswith("2.9."):
        _refuse(f"this is torch_xla {found}, not torch_xla 2.9")
    client = xlac.CLIENTS[platform_name]
    unable = (xlac.DESERIALIZE, xlac.LOAD)
    try:
        symbols = xlac.symbols_of([client.table, client.load_serialized, *unable])
    except NotImplementedError as error:
        _refuse(str(error))

    address, size = symbols[client.table]
    table = (ctypes.c_uint64 * (size // 8)).from_address(address)
    places = []
    for name in unable:
        function = symbols[name].address
        places.append([place for place, entry in enumerate(table) if entry == function])
    if not any(places):
        return  # repaired before
    if [len(found) for found in places] != [1, 1] or not _is_read_only(address):
        _refuse(f"the functions of xla::{client.name} are not as expected")
    deserialize, load = _functions(symbols[client.load_serialized].address)
    _patch_table(address, size, table, {places[0][0]: deserialize, places[1][0]: load})


def _refuse(reason: str) -> NoReturn:
    raise NotImplementedError(
        f"compiled programs cannot be kept on disk: {reason}. Train without the compilation cache"
    )


def _functions(both_steps: int) -> tuple[int, int]:
    """Creates two functions, which stay until the process ends, and returns their addresses.

    Python functions would deadlock: torch_xla holds a lock that a thread with the GIL may wait for.
    Registers: rdi, the address for the result (status 1: OK, pointer), is returned in rax; rsi the
    client; rdx ... the arguments.
    """
    enter = bytes.fromhex("f30f1efa")  # endbr64, which call targets may need
    libc = _libc()
    size, private = mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    if page == ctypes.c_void_p(-1).value:
        _refuse("there is no memory for two functions")
    no_options = page + size // 2  # LoadOptions of zeros
    deserialize = (
        enter
        + b"\x49\xb9"  # r9 = LoadOptions, which the first step lacks
        + struct.pack("<Q", no_options)
        + b"\x48\xb8"  # rax = LoadSerializedExecutable
        + struct.pack("<Q", both_steps)
        + b"\xff\xe0"  # jump
    )
    load = enter + bytes.fromhex(
        "488b02"  # rax = *rdx
        "48c70200000000"  # *rdx = 0
        "48c70701000000"  # the status is OK
        "48894708"  # the pointer is the result
        "4889f8c3"  # return rdi
    )
    ctypes.memmove(page, deserialize, len(deserialize))
    ctypes.memmove(page + 64, load, len(load))
    if libc.mprotect(page, size, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        libc.munmap(page, size)
        _refuse("this system lets no process make functions at run time")
    return page, page + 64


def _is_read_only(address: int) -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            span, permissions = line.split()[:2]
            first, last = (int(text, 16) for text in span.split("-"))
            if first <= address < last:
                return permissions.startswith("r--")
    return False


def _patch_table(start: int, size: int, table: ctypes.Array, entries: dict[int, int]) -> None:
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    length = start + size - first
    libc = _libc()
    # Tables of virtual functions are read-only once a library is loaded.
    if libc.mprotect(first, length, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        _refuse("this system lets no process change a library at run time")
    for place, entry in entries.items():
        table[place] = entry
    libc.mprotect(first, length, mmap.PROT_READ)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [pointer, size, ctypes.c_int]
    libc.munmap.argtypes = [pointer, size]
    return libc
