"""``load_checkpoint``: all ranks read and check everything before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..collectives.random_state import synced_device
from ..consolidate.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    MissingRankError,
    MixedSaveError,
)
from ..consolidate.format import folders
from ..consolidate.format.reader import ShardedCheckpoint
from .incomplete_save import wait_until
from .rank_exchange import RankExchange
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
    """Loads a checkpoint that :func:`save_checkpoint` saved. Call it on every rank.

    The number of ranks and the wrapping of the model may differ from those of the save. If both are
    the same, resumed training is bit-exact (random states included); otherwise it is equal up to
    rounding. Every byte that is used is compared with its digest. Nothing is changed before all
    ranks have read and checked everything they need. Host memory: a copy of this rank's shards and
    buffers.

    Args:
        path: the folder of a checkpoint, or a folder with several, of which the newest is loaded.
        model, optimizer, scheduler: the objects to load into. ``None`` loads no such state.
        strict: ``True`` requires the same names in model and checkpoint. ``False`` leaves values
            that only one of them has unchanged. Shapes and dtypes must always match.
        restore_rng: restore the random states of torch and XLA, if the number of ranks is the same.
        missing_ok: return ``None`` if there is no checkpoint. Rank 0 decides for all ranks, so that
            they agree even if a new checkpoint is not visible on all hosts yet.
        step: load the last checkpoint of this step in the folder ``path``, not the newest.
        weights: load parameters and buffers. ``False`` leaves ``model`` unchanged: it is used only
            to find the parameters of the optimizer state.

    Returns:
        The path, the step and ``extra`` of the checkpoint, and the number of ranks that saved it.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no complete checkpoint.
        CheckpointError: files are damaged, missing, or from different saves. The message names the
            file.
        ModelMismatchError: the checkpoint does not match the model or the optimizer.
        OtherRankError: another rank failed. If one rank raises, all ranks do.
    """
    exchange = RankExchange()
    with synced_device():
        found = exchange.run_on_first_rank(
            "find the checkpoint", lambda: find_checkpoint(path, missing_ok, step)
        )
        if found is None:
            return None

        def read() -> Prepared:
            reader = Reader(open_checkpoint(found), exchange)
            return prepare(reader, model, optimizer, scheduler, strict, restore_rng, weights)

        prepared = apply_prepared(exchange, exchange.run_on_each_rank("read the checkpoint", read))
    prepared.restore_rng()
    return prepared.result


def apply_prepared(exchange: RankExchange, prepared: Prepared) -> Prepared:
    """Loads the prepared values on all ranks, except random states."""
    # The scheduler first: its load_state_dict is the user's code and may raise.
    exchange.run_and_gather("load the scheduler", prepared.apply_scheduler)
    # This is also a barrier: no rank continues training before all have loaded.
    exchange.run_and_gather("load the checkpoint", prepared.apply)
    return prepared


def open_checkpoint(found: list[Any]) -> ShardedCheckpoint:
    """Opens on this rank the checkpoint that rank 0 found with :func:`find_checkpoint`.

    Raises:
        MixedSaveError: the folder has been replaced by another save.
    """
    # Rank 0 has seen all files. The listing of this rank's host may be older.
    checkpoint = retry_while_missing(lambda: ShardedCheckpoint(found[0]))
    if checkpoint.manifest.save_id != found[1]:
        raise MixedSaveError(
            f"{found[0]}: another save replaced it while it was loaded. Load again when no process "
            "writes to this folder."
        )
    return checkpoint


def retry_while_missing(opened: Callable[[], ShardedCheckpoint]) -> ShardedCheckpoint:
    """Calls ``opened()``, and repeats it for up to 30 s while files are missing.

    Another rank has seen these files. Network file systems and cached listings show them later.
    """
    found: list[ShardedCheckpoint] = []
    missing: list[CheckpointError] = []

    def there() -> bool:
        try:
            found.append(opened())
        except (CheckpointNotFoundError, MissingRankError) as error:
            missing.append(error)
        return bool(found)

    if not wait_until(there):
        raise missing[-1]
    return found[0]


def find_checkpoint(
    path: str | os.PathLike, missing_ok: bool, step: int | None
) -> list[Any] | None:
    """The folder, save id and step of the checkpoint at ``path``; ``None`` if there is none."""
    text = os.fsdecode(path)
    try:
        _, folder = folders.resolve_checkpoint(text, step)
    except CheckpointNotFoundError:
        if missing_ok:
            return None
        raise
    name = folder.rpartition("/")[2]
    given = text.rstrip("/") or "/"
    is_itself = step is None and given.rpartition("/")[2] == name
    shown = given if is_itself else f"{given}/{name}"
    manifest = ShardedCheckpoint(shown).manifest
    return [shown, manifest.save_id, manifest.step]
