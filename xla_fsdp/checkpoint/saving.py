"""``save_checkpoint``: returns when the checkpoint is complete."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from torch import nn

from ..collectives.random_state import at_rest
from ..consolidate.format.rank_file import FileRecord
from .draft import Request, begin
from .meeting import Meeting


def save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int,
    extra: Any = None,
    keep_last: int | None = None,
) -> str:
    """Saves a training run into a new folder ``step-XXXXXXXX`` in ``path``; call on every rank.

    Each rank writes the shards it holds. The checkpoint can be loaded by any number of ranks and
    into any wrapping of the model (:func:`load_checkpoint`), and joined into one file
    (``python -m xla_fsdp.consolidate``). It exists once it is complete: a save that fails or is
    killed leaves all earlier checkpoints as they are. Memory on the host: one tensor at a time.

    Args:
        path: a folder that all ranks see; local, mounted, or a URL for fsspec (``gs://...``).
        model: wrapped in any way, or not at all.
        optimizer: a torch optimizer of ``model.parameters()`` whose state is tensors of the
            parameter's shape and plain values.
        scheduler: anything with a ``state_dict()`` of plain values.
        step: how far training is, at least 0; a step that is there already is replaced.
        extra: anything of None, numbers, strings, bytes, lists, tuples, dicts and small tensors
            (up to 1 MiB each). Rank 0's is kept.
        keep_last: afterwards remove all but so many of the newest steps up to this one; rank 0
            does, while the others go on.

    Returns:
        The path of the checkpoint's folder.

    Raises:
        TypeError, ValueError, UnsupportedValueError: an argument that cannot be saved.
        OutputError: no space, no permission, an I/O error.
        SharedStorageError: the ranks do not see each other's files.
        ModelMismatchError: the ranks have different things to save.
        OtherRankError: another rank failed. If one rank raises, all do.
    """
    meeting = Meeting()
    with at_rest() as random:
        request = meeting_request(meeting, path, step, keep_last)
        draft = begin(meeting, request, model, optimizer, scheduler, extra, random)
        try:
            written = meeting.together("write its file", lambda: asdict(draft.write()))
            saved = meeting.first("complete the checkpoint", lambda: draft.commit(records(written)))
        except Exception:
            draft.give_up(meeting)
            raise
    if meeting.rank == 0:  # the others train on
        draft.tidy()
    return saved


def meeting_request(
    meeting: Meeting, path: str | os.PathLike, step: int, keep_last: int | None
) -> Request:
    """The request, checked on all ranks."""
    return meeting.each(
        "save with these arguments", lambda: Request(os.fsdecode(path), step, keep_last)
    )


def records(written: list[dict[str, Any]]) -> list[FileRecord]:
    """What ranks told about their files, as it came out of JSON."""
    return [FileRecord(**{**each, "digests": tuple(each["digests"])}) for each in written]
