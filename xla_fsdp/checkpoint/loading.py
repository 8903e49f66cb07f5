"""``load_checkpoint``: everything is read and checked on all ranks before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..collectives.random_state import at_rest
from ..consolidate.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    MissingRankError,
    MixedSaveError,
)
from ..consolidate.format import folders
from ..consolidate.format.reader import ShardedCheckpoint
from .draft import eventually
from .meeting import Meeting
from .reading import LoadedCheckpoint, Prepared, Reader, prepare


def load_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    strict: bool = True,
    restore_rng: bool = True,
    missing_ok: bool = False,
    step: int | None = None,
    weights: bool = True,
) -> LoadedCheckpoint | None:
    """Loads what :func:`save_checkpoint` saved; call on every rank.

    Any number of ranks, and any wrapping of the model. On as many ranks as saved it, wrapped alike,
    training goes on bit for bit (random states included); otherwise to rounding. Every byte that is
    used is compared with its digest, and nothing is changed before all ranks have read and checked
    all they need. Memory on the host: what this rank holds.

    Args:
        path: a checkpoint's folder, or a folder of them, of which the newest is taken.
        model, optimizer, scheduler: what to load into; ``None`` is left out.
        strict: the names in model and checkpoint must be the same. Otherwise what only one side has
            is left as it is. Shapes and dtypes must fit in any case.
        missing_ok: return ``None`` if there is no checkpoint. All ranks go by what rank 0 finds;
            of their own :func:`latest_checkpoint` one may have found what others do not see yet.
        step: the last that was saved of this step in the folder ``path``, not the newest.
        restore_rng: restore torch's and XLA's random states, if as many ranks saved them.
        weights: load parameters and buffers. Otherwise ``model`` only says whose state the
            optimizer has, and is left as it is.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is none.
        CheckpointError: it is damaged, mixed or incomplete; the message names the file.
        ModelMismatchError: it does not fit.
        OtherRankError: another rank failed. If one rank raises, all do.
    """
    meeting = Meeting()
    with at_rest():
        found = meeting.first("find the checkpoint", lambda: find(path, missing_ok, step))
        if found is None:
            return None

        def read() -> Prepared:
            reader = Reader(open_found(found), meeting)
            return prepare(reader, model, optimizer, scheduler, strict, restore_rng, weights)

        prepared = take_effect(meeting, meeting.each("read the checkpoint", read))
    prepared.restore_rng()
    return prepared.result


def take_effect(meeting: Meeting, prepared: Prepared) -> Prepared:
    """Changes what is to be loaded into, on all ranks, all but random states."""
    # First what may refuse for reasons of its own.
    meeting.together("load the scheduler", prepared.apply_scheduler)
    # Nobody trains on before all have loaded.
    meeting.together("load the checkpoint", prepared.apply)
    return prepared


def open_found(found: list[Any]) -> ShardedCheckpoint:
    """What rank 0 has found, with :func:`find`, opened on this rank.

    Raises:
        MixedSaveError: it is another save by now.
    """
    # Rank 0 has seen it whole; what this rank's host lists may be older.
    checkpoint = patiently(lambda: ShardedCheckpoint(found[0]))
    if checkpoint.manifest.save_id != found[1]:
        raise MixedSaveError(
            f"{found[0]}: was another save when rank 0 looked; load again once nobody writes"
        )
    return checkpoint


def patiently(opened: Callable[[], ShardedCheckpoint]) -> ShardedCheckpoint:
    """``opened()``, again for a while if files are not there that another rank has seen: file
    systems over a network, and caches of listings, take their time."""
    found: list[ShardedCheckpoint] = []
    missing: list[CheckpointError] = []

    def there() -> bool:
        try:
            found.append(opened())
        except (CheckpointNotFoundError, MissingRankError) as error:
            missing.append(error)
        return bool(found)

    if not eventually(there):
        raise missing[-1]
    return found[0]


def find(path: str | os.PathLike, missing_ok: bool, step: int | None) -> list[Any] | None:
    """The folder that ``path`` means, its save and its step; ``None`` if there is none."""
    text = os.fsdecode(path)
    try:
        _, folder = folders.resolve(text, step)
    except CheckpointNotFoundError:
        if missing_ok:
            return None
        raise
    name = folder.rpartition("/")[2]
    whole = text.rstrip("/") or "/"
    is_itself = step is None and whole.rpartition("/")[2] == name
    shown = whole if is_itself else f"{whole}/{name}"
    manifest = ShardedCheckpoint(shown).manifest
    return [shown, manifest.save_id, manifest.step]
