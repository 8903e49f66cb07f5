"""Finds, reads and checks per-rank torch files.

A rank file is ``{"model": state_dict, "shard_metadata": metadata, ...}``. The result of an earlier
run is ``{"model": state_dict, "consolidated": ...}``.
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
    """Sorted paths of the files that match. Only `suffix` is a pattern.

    Raises:
        CheckpointNotFoundError: no file matches.
    """
    paths = sorted(glob.glob(glob.escape(prefix) + suffix))
    if not paths:
        raise CheckpointNotFoundError(
            f"{prefix}{suffix}: no file matches. Check the prefix and the suffix."
        )
    return paths


def read_ranks(prefix: str, suffix: str, allow_unsafe_pickle: bool = False) -> list[Rank]:
    """The content of every rank file that matches. Results of earlier runs are skipped."""
    ranks, paths = [], find_files(prefix, suffix)
    for path in paths:
        content = read_file(path, allow_unsafe_pickle)
        if not _is_consolidated(content, path == prefix + OUTPUT_NAME):
            ranks.append(rank_from_checkpoint(content, path))
            for key in ranks[-1].layout.parameters:
                _require_stored(key, ranks[-1])
    if not ranks:
        raise MissingRankError(
            f"{paths[0]}: is a consolidated model, and no rank file matches. Check the prefix and "
            "the suffix."
        )
    return ranks


def read_file(
    path: str, allow_unsafe_pickle: bool = False, remedy: str = "--allow_unsafe_pickle would"
) -> Any:
    """Content of a torch file. Its tensors are memory-mapped, so this does not read their values.

    Files of torch before 1.6 cannot be mapped and are read completely. With
    ``allow_unsafe_pickle``, code in the file runs. ``remedy``: the advice in the message of
    :class:`UnsafeFileError`.

    Raises:
        UnsafeFileError: the file refers to objects that torch does not consider safe.
        UnreadableFileError: the file is truncated, corrupt or not a torch file.
    """
    if not os.path.isfile(path):
        raise UnreadableFileError(f"{path}: not a regular file")
    try:
        is_zip = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            # torch warns about plain pickles. Below, they raise an error that explains more.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            # torch warns that it checks the indices of sparse tensors, as it should here.
            warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
            safe = not allow_unsafe_pickle
            return torch.load(path, map_location="cpu", weights_only=safe, mmap=is_zip)
    except MemoryError:
        raise
    except Exception as error:
        # Damaged input can raise any exception in torch's reader.
        unsafe = _unsafe_globals(path, error)
        if unsafe:
            raise UnsafeFileError(
                f"{path}: needs {unsafe}, which is not safe to load; nothing was executed"
                f" ({remedy})"
            ) from error
        # torch's message for a pickle error recommends to load the file without weights_only.
        shown = UnpicklingError() if isinstance(error, UnpicklingError) else error
        raise UnreadableFileError(
            f"{path}: cannot be read (truncated, corrupt or not a checkpoint):"
            f" {first_line(shown):.120}"
        ) from error


def _unsafe_globals(path: str, error: Exception) -> str:
    """Names of the unsafe objects that `path` refers to, "" if `error` has another cause."""
    if not isinstance(error, UnpicklingError):
        return ""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        # Not a zip file: only the message has the name of the unsafe object.
        refused = re.search(r"unsupported global:? (?:GLOBAL )?(\S+)", str(error), re.IGNORECASE)
        return refused[1] if refused else ""
    return ", ".join(sorted(found)[:4])


def _is_consolidated(content: Any, default_name: bool) -> bool:
    """Whether `content` is a result and not a rank file.

    A result of the in-tree class has no mark except the default name.
    """
    if not isinstance(content, Mapping) or "shard_metadata" in content:
        return False
    return "consolidated" in content or (default_name and content.keys() == {"model"})


def _require_stored(key: str, rank: Rank) -> None:
    """Checks that a shard has as many bytes as its shape needs. With stride 0, a small file could
    have a huge tensor, and the result would fill the disk."""
    shard = rank.state_dict[key]
    if shard.numel() * shard.element_size() > shard.untyped_storage().nbytes():
        raise ShardMismatchError(
            f"{rank.label}: shard {key!r} of shape {list(shard.shape)} has fewer bytes than that "
            "shape needs. Save it as a contiguous tensor."
        )


def save_id(paths: list[str]) -> str:
    """An id that changes when one of the files is written again. The files have no id inside."""
    found = [(os.path.basename(p), os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in paths]
    return digest(repr(found).encode())


def verify_files(paths: list[str], progress: Callable[[int], None]) -> None:
    """Checks the CRCs of the zip files. ``progress`` is called with the size of each file.

    Raises:
        UnreadableFileError: a CRC differs, or a file is from torch before 1.6 and has no CRCs.
    """
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # zipfile raises many kinds of exceptions
            raise UnreadableFileError(
                f"{path}: is not a zip file, so it has no CRCs to check. Save it with torch 1.6 or "
                "later."
            ) from error
        if damaged is not None:
            raise UnreadableFileError(
                f"{path}: the bytes of {damaged} are not those that were saved (their CRC differs)."
                " Use another checkpoint."
            )
        progress(os.path.getsize(path))


# Pages of a mapped file that were read count as memory of the process until they are unloaded.


def can_forget(path: str) -> bool:
    """Whether pages of tensors that torch mapped from ``path`` may be unloaded.

    In files of big-endian machines, torch reverses the bytes in memory; unloading would undo that.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            order = next(n for n in archive.namelist() if n.endswith("/byteorder"))
            return archive.getinfo(order).file_size < 16 and archive.read(order) == b"little"
    except Exception:
        return False  # not a zip file and therefore not mapped, or without a byte order


def forget(part: torch.Tensor) -> None:
    """Unloads the pages inside ``part``, a contiguous tensor. They are read again when needed."""
    page = mmap.PAGESIZE
    begin = -(-part.data_ptr() // page) * page
    end = (part.data_ptr() + part.numel() * part.element_size()) // page * page
    if begin < end:
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
