"""Letting go of parts of a mapped file, which otherwise count as memory of the process."""

from __future__ import annotations

import ctypes
import mmap
import zipfile

import torch


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
