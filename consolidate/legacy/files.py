"""Per-rank torch files: which there are, and what is in them. The only module that knows.

A rank file is ``{"model": state_dict, "shard_metadata": metadata, ...}``; a result of earlier runs
is ``{"model": state_dict, "consolidated": ...}``.
"""

from __future__ import annotations

import ctypes
import glob
import mmap
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from ..errors import (
    CheckpointNotFoundError,
    MissingRankError,
    ShardMismatchError,
    UnreadableFileError,
    UnsafeFileError,
    first_line,
)
from ..format.digests import digest
from .ranks import Rank, rank_from_checkpoint

OUTPUT_NAME = "_consolidated.pth"


def find_files(prefix: str, suffix: str) -> list[str]:
    """Sorted paths of the files that match; only `suffix` is a pattern.

    Raises:
        CheckpointNotFoundError: there are none.
    """
    paths = sorted(glob.glob(glob.escape(prefix) + suffix))
    if not paths:
        raise CheckpointNotFoundError(f"{prefix}{suffix}: no file matches")
    return paths


def read_ranks(prefix: str, suffix: str, allow_unsafe_pickle: bool = False) -> list[Rank]:
    """What every file that matches holds, results of earlier runs left out."""
    ranks, paths = [], find_files(prefix, suffix)
    for path in paths:
        content = read_file(path, allow_unsafe_pickle)
        if not _is_consolidated(content, path == prefix + OUTPUT_NAME):
            ranks.append(rank_from_checkpoint(content, path))
            for key in ranks[-1].layout.parameters:
                _require_stored(key, ranks[-1])
    if not ranks:
        raise MissingRankError(f"{paths[0]}: is a consolidated model, and there are no rank files")
    return ranks


def read_file(
    path: str, allow_unsafe_pickle: bool = False, remedy: str = "--allow_unsafe_pickle would"
) -> Any:
    """Content of a rank file, its tensors mapped from disk: reading them does not copy the file.

    Files in torch's format from before version 1.6 cannot be mapped and are read whole. With
    ``allow_unsafe_pickle``, code in the file is executed; ``remedy``: what the error says of that.

    Raises:
        UnsafeFileError: it refers to objects that torch does not hold to be safe.
        UnreadableFileError: it is truncated, corrupt or not a torch file.
    """
    if not os.path.isfile(path):
        raise UnreadableFileError(f"{path}: not a regular file")
    try:
        is_zip = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            # Said of plain pickles; those are refused below with a better explanation.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            # Newer torch checks the indices of sparse tensors, as one wants of files, and says so.
            warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
            safe = not allow_unsafe_pickle
            return torch.load(path, map_location="cpu", weights_only=safe, mmap=is_zip)
    except MemoryError:
        raise
    except Exception as error:
        # Damaged input can fail anywhere in the reader, with any exception.
        unsafe = _unsafe_globals(path, error)
        if unsafe:
            raise UnsafeFileError(
                f"{path}: needs {unsafe}, which is not safe to load; nothing was executed"
                f" ({remedy})"
            ) from error
        # torch's own text for a pickle error recommends to try again without the protection.
        said = UnpicklingError() if isinstance(error, UnpicklingError) else error
        raise UnreadableFileError(
            f"{path}: cannot be read (truncated, corrupt or not a checkpoint):"
            f" {first_line(said):.120}"
        ) from error


def _unsafe_globals(path: str, error: Exception) -> str:
    """Names of the unsafe objects that `path` refers to, "" if that is not what went wrong."""
    if not isinstance(error, UnpicklingError):
        return ""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        # Not a zip file: what torch refused stands in its message only.
        refused = re.search(r"unsupported global:? (?:GLOBAL )?(\S+)", str(error), re.IGNORECASE)
        return refused[1] if refused else ""
    return ", ".join(sorted(found)[:4])


def _is_consolidated(content: Any, default_name: bool) -> bool:
    """Whether `content` is a result rather than a rank file; the in-tree class marks its own by
    nothing but the default name."""
    if not isinstance(content, Mapping) or "shard_metadata" in content:
        return False
    return "consolidated" in content or (default_name and content.keys() == {"model"})


def _require_stored(key: str, rank: Rank) -> None:
    """A few bytes can be given the shape of many (stride 0), and would fill the disk."""
    shard = rank.state_dict[key]
    if shard.numel() * shard.element_size() > shard.untyped_storage().nbytes():
        raise ShardMismatchError(
            f"{rank.label}: shard {key!r} of shape {list(shard.shape)} has fewer bytes than that"
        )


def save_id(paths: list[str]) -> str:
    """Changes whenever one of the files is written again; there is nothing better in them."""
    found = [(os.path.basename(p), os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in paths]
    return digest(repr(found).encode())


def verify_files(paths: list[str], progress: Callable[[int], None]) -> None:
    """Compares the zip files' CRCs. ``progress`` is told how many bytes at a time.

    Raises:
        UnreadableFileError: one differs, or a file is from before torch 1.6 and has none.
    """
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # zipfile lets many things escape
            raise UnreadableFileError(f"{path}: no zip file whose bytes can be checked") from error
        if damaged is not None:
            raise UnreadableFileError(
                f"{path}: the bytes of {damaged} are not those that were saved (CRC); use another"
                " checkpoint"
            )
        progress(os.path.getsize(path))


# Parts of a mapped file that were read count as memory of the process until they are let go of.


def can_forget(path: str) -> bool:
    """Whether tensors that torch mapped from ``path`` are still just the file.

    torch reverses the bytes of files from big-endian machines in memory; forgetting would undo it.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            order = next(n for n in archive.namelist() if n.endswith("/byteorder"))
            return archive.getinfo(order).file_size < 16 and archive.read(order) == b"little"
    except Exception:
        return False  # not a zip file, hence not mapped, or none that says


def forget(part: torch.Tensor) -> None:
    """Unloads the pages that lie within ``part``, contiguous; they are read again when needed."""
    page = mmap.PAGESIZE
    begin = -(-part.data_ptr() // page) * page
    end = (part.data_ptr() + part.numel() * part.element_size()) // page * page
    if begin < end:
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
