"""Compiled programs kept on disk, so that the next start of a job need not compile.

torch_xla has such a cache, which in version 2.9 writes programs and can not load them
(:mod:`xla_fsdp.compiled.loading` says why and mends it) and which trusts its files blindly
(:mod:`xla_fsdp.compiled.store` puts checked ones in front of it). Its key covers the program, the
devices and the flags of XLA; that of a folder in the store what is missing from it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla._internal import tpu

from . import loading, store
from .kind import describe_kind

# "PID:FOLDER", where the process PID keeps programs.
_STORE = "XLA_FSDP_COMPILATION_CACHE"
# What torch_xla's cache is told, and only read when it is made.
_TORCH_XLA = ("XLA_PERSISTENT_CACHE_PATH", "XLA_PERSISTENT_CACHE_READ_ONLY")
# For who did not ask for it: "none", or a folder.
_BY_DEFAULT = "XLA_FSDP_COMPILATION_CACHE_FOLDER"
_LIMIT = 8 << 30
# All programs that fit are read at every start, however short.
_LIMIT_BY_DEFAULT = 1 << 30
# One thread of a process opens the store.
_opening = threading.Lock()


class CompilationCounts(NamedTuple):
    """Programs that this process got so far.

    Attributes:
        compiled: by compiling them.
        cached: by loading them from the compilation cache.
    """

    compiled: int
    cached: int


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> Path:
    """Keeps compiled programs in a folder; those that are there are loaded, not compiled.

    Call it in the main program before :func:`launch`, and before anything touches an XLA device.
    Processes that ``launch`` starts, on TPU, use the folder too; under ``torchrun`` each calls it.
    Programs are only used again with the same versions, flags and kind of processor, and if the
    file has the digest that it was written with: what is damaged or cut off is compiled again.
    Any number of processes may use a folder at once. It holds up to 8 GiB; the oldest programs are
    removed at a start. On a pod give every host a folder on its own disk.

    Args:
        path: the folder, created if need be; ``None``: ``$XDG_CACHE_HOME/xla_fsdp/compiled``, by
            default in ``~/.cache``.

    Returns:
        The folder.

    Raises:
        ValueError: ``path`` is empty.
        RuntimeError: XLA's runtime was started before, or another folder is in use.
        NotImplementedError: impossible with this torch_xla or on this machine. Nothing was changed.
        OSError: the folder can not be created or written, or anybody can write there: the programs
            in it are run.
    """
    if path is None:
        path = _in_the_users_cache("compiled")
    if isinstance(path, str) and not path.strip():
        raise ValueError(f"path must name a folder, or be None for the default one; got {path!r}")
    folder = Path(path).absolute()
    if _folder_in_use() == str(folder):
        return folder
    if _folder_in_use() is not None:
        raise RuntimeError(
            f"this process keeps its compiled programs in {_folder_in_use()} already"
        )
    xlac = torch_xla._XLAC
    if xlac._xla_runtime_is_initialized() or xlac._xla_computation_cache_is_initialized():
        raise RuntimeError(
            "enable_compilation_cache was called after XLA's runtime had started; call it in the "
            "main program before launch and before anything touches an XLA device"
        )
    _open(folder, _part_by_environment(), _LIMIT)
    os.environ[_STORE] = f"{os.getpid()}:{folder}"
    return folder


def keep_by_default() -> None:
    """What :func:`launch` does for ranks on a CPU, before it starts XLA's runtime.

    Programs are kept in ``$XLA_FSDP_COMPILATION_CACHE_FOLDER``, or in ``xla_fsdp/ranks`` of the
    user's cache; up to 1 GiB. "none" there, :func:`enable_compilation_cache` or torch_xla's own
    cache leave this one out.

    Raises:
        OSError: the folder that the variable names can not be used.
    """
    wish = os.environ.get(_BY_DEFAULT, "").strip()
    chosen = wish == "none" or _folder_in_use() is not None or _TORCH_XLA[0] in os.environ
    if chosen or torch_xla._XLAC._xla_computation_cache_is_initialized():
        return
    folder = Path(wish).absolute() if wish else _in_the_users_cache("ranks")
    try:
        _open(folder, _part_by_environment(), _LIMIT_BY_DEFAULT)
    except NotImplementedError:
        return  # programs are compiled, as ever
    except OSError as error:
        if wish:
            raise
        warnings.warn(f"{error.strerror}, or set {_BY_DEFAULT} to one, or to none", stacklevel=2)
        return
    os.environ[_STORE] = f"{os.getpid()}:{folder}"


def compilation_counts() -> CompilationCounts:
    """How many programs this process has compiled, and how many it has loaded."""
    return CompilationCounts(
        met.counter_value("UncachedCompile") or 0, met.counter_value("PersistentCacheHit") or 0
    )


def in_spawned_processes(fn: Callable) -> Callable:
    """``fn``, to be run in processes that use the cache like this one, each for itself."""
    folder = _folder_in_use()
    return fn if folder is None else partial(_with_store, folder, fn)


def _in_the_users_cache(name: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "xla_fsdp" / name


def _folder_in_use() -> str | None:
    process, _, folder = os.environ.get(_STORE, "").partition(":")
    return folder if process == str(os.getpid()) else None


def _with_store(folder: str, fn: Callable, *args: Any) -> Any:
    with _opening:  # TPU v2 and v3 run two ranks in a process
        if not torch_xla._XLAC._xla_computation_cache_is_initialized():
            try:
                _open(Path(folder), f"{xr.process_index()} of {xr.process_count()}", _LIMIT)
            except (OSError, NotImplementedError) as error:
                # What this process can do without is no reason to stop the others.
                warnings.warn(f"no compilation cache in this process: {error}", stacklevel=2)
    return fn(*args)


def _open(folder: Path, part: str, limit: int) -> None:
    on = _platform()
    loading.repair(on)
    about = describe_kind(on, part)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mode & stat.S_IWOTH:
            raise PermissionError(
                errno.EPERM, "anybody can put programs there, which you would run"
            )
        kind = f"{on.lower()}-{digest[:16]}"
        run = store.open_run(folder.resolve(), kind, about, limit, _has_a_program)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"compiled programs can not be kept in {folder} ({error.strerror}); name a folder of "
            "your own, with space left",
        ) from error
    # Overrides what the user may have set: without checks that is not used.
    xr.initialize_cache(str(run.folder), readonly=False)
    xr.get_num_cached_compilation_graph()  # makes the cache; it does not start the runtime
    for name in _TORCH_XLA:
        # Not for processes that this one starts: the folder is of this one only.
        os.environ.pop(name, None)


def _has_a_program() -> bool:
    return any(compilation_counts())


def _platform() -> str:
    device = os.environ.get("PJRT_DEVICE")
    if device is None:
        return "TPU" if tpu.num_available_chips() > 0 else "CPU"
    name = device.split("_")[0]
    if name not in ("CPU", "TPU"):
        raise NotImplementedError(f"programs of PJRT_DEVICE={device} are not kept; CPU and TPU are")
    return name


def _part_by_environment() -> str:
    if dist.is_torchelastic_launched():
        return f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    return "0 of 1"
