"""Checking a checkpoint, writing nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .legacy import LegacySource, verify_files
from .progress import Progress, silent
from .run import open_source


def verify_checkpoint(
    path: Any,
    *,
    suffix: str | None = None,
    allow_unsafe_pickle: bool = False,
    progress: Callable[[str, int], Progress] = silent,
) -> str:
    """Checks that a checkpoint is complete and consistent, and every byte of it.

    Of a checkpoint folder the digests; of per-rank torch files the CRCs of the zip files, which
    find a flipped bit, but not files of two steps. Returns a line that says what was checked.

    Raises:
        CheckpointError: one of its subclasses, naming the file.
    """
    source = open_source(path, suffix, allow_unsafe_pickle=allow_unsafe_pickle)
    if isinstance(source, LegacySource):
        size = verify_files(source.inputs)
        what = f"{len(source.inputs)} rank files, CRCs"
    else:
        size = sum(record.size for record in source.manifest.files)
        with progress("verify", size) as bar:
            source.checkpoint.verify(bar)
        origin = source.origin
        what = f"step {origin.step}, {origin.world_size} ranks, digests"
    return f"verified {source.label}: {what}, {len(source.parameters)} parameters, {size} bytes"
