"""How checkpoints lie on disk: torch zip files, one a rank. The only module that knows.

A rank file is ``{"model": state_dict, "shard_metadata": metadata, ...}``; the result is
``{"model": state_dict, "consolidated": marker}``.
"""

import contextlib
import glob
import os
import re
import secrets
import warnings
import zipfile
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from .errors import CheckpointNotFoundError, OutputError, UnreadableFileError, UnsafeFileError

_MARKER = "consolidated"


def find_files(prefix: str, suffix: str) -> list[str]:
    """Sorted paths of the files that match; only `suffix` is a pattern.

    Raises:
        CheckpointNotFoundError: there are none.
    """
    paths = sorted(glob.glob(glob.escape(prefix) + suffix))
    if not paths:
        raise CheckpointNotFoundError(f"{prefix}{suffix}: no file matches")
    return paths


def read_file(path: str, allow_unsafe_pickle: bool = False) -> Any:
    """Content of a rank file, its tensors mapped from disk: reading them does not copy the file.

    Files in torch's format from before version 1.6 cannot be mapped and are read whole. With
    ``allow_unsafe_pickle``, code in the file is executed.

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
                " (--allow_unsafe_pickle would)"
            ) from error
        # torch's own text for a pickle error recommends to try again without the protection.
        reason = "" if isinstance(error, UnpicklingError) else str(error).partition("\n")[0]
        raise UnreadableFileError(
            f"{path}: cannot be read (truncated, corrupt or not a checkpoint):"
            f" {reason or type(error).__name__:.120}"
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


def is_consolidated(content: Any) -> bool:
    """Whether `content` is a result of this package rather than a rank file."""
    return isinstance(content, Mapping) and _MARKER in content and "shard_metadata" not in content


def check_output(path: str, inputs: list[str]) -> None:
    """Refuse a place that cannot be written, before any work is done.

    Raises:
        OutputError: it is one of `inputs`, a directory, or in a directory that does not exist.
    """
    if os.path.isdir(path):
        raise OutputError(f"{path}: is a directory, expected a file to write")
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise OutputError(f"{path}: directory {directory} does not exist")
    for source in inputs:
        # By identity, not name: a link to an input would be destroyed just the same.
        if os.path.exists(path) and os.path.samefile(path, source):
            raise OutputError(f"{path}: would overwrite the input {source}")


def write_file(path: str, state_dict: Mapping[str, Any], marker: Mapping[str, Any]) -> int:
    """Write the result beside `path`, flush it to disk, rename it there. Returns its bytes.

    `path` holds its old content or all of the new at any time; on failure nothing is left behind.

    Raises:
        OutputError: the file cannot be created or written.
    """
    directory, name = os.path.split(path)
    # Hidden, so that no suffix pattern picks up a file in the making.
    partial = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            torch.save({"model": state_dict, _MARKER: dict(marker)}, file)
            file.flush()
            os.fsync(file.fileno())
        size = os.path.getsize(partial)
        os.replace(partial, path)
        _sync_directory(directory or ".")
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{path}: cannot be written: {error}") from error
    finally:
        # Also on an interrupt. After the rename there is nothing to remove.
        if os.path.lexists(partial):
            os.unlink(partial)
    return size


def _sync_directory(directory: str) -> None:
    """Make the rename itself durable, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Network file systems may refuse this; the file is complete and in place all the same.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
