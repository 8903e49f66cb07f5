"""``save_checkpoint``: saves a checkpoint and returns when it is complete."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from torch import nn

from ..collectives.random_state import synced_device
from ..consolidate.format.rank_file import FileRecord
from .incomplete_save import Request, begin_save
from .rank_exchange import RankExchange


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
    """Saves a checkpoint into a new folder ``step-XXXXXXXX`` in ``path``. Call it on every rank.

    Each rank writes its shards. The checkpoint can be loaded by any number of ranks and with any
    wrapping of the model (:func:`load_checkpoint`), and converted into one file
    (``python -m xla_fsdp.consolidate``). The folder appears only when the checkpoint is complete: a
    save that fails or is killed leaves all earlier checkpoints unchanged. Host memory: one tensor
    at a time.

    Args:
        path: a folder that all ranks share: local, mounted, or a URL of fsspec (``gs://...``).
        model: a module, wrapped in any way or not wrapped.
        optimizer: a torch optimizer of ``model.parameters()``. Its state must be tensors of the
            parameter's shape and plain values.
        scheduler: any object with a ``state_dict()`` of plain values.
        step: number of the training step, at least 0. A checkpoint of the same step is replaced.
        extra: a value made of None, numbers, strings, bytes, lists, tuples, dicts and small tensors
            (up to 1 MiB each). The value of rank 0 is saved.
        keep_last: number of steps to keep. Rank 0 removes older ones after the save, while the
            other ranks continue. Steps after this one are not removed. ``None`` keeps all.

    Returns:
        The path of the checkpoint's folder.

    Raises:
        TypeError, ValueError, UnsupportedValueError: an argument cannot be saved.
        OutputError: no space, no permission, or an I/O error.
        SharedStorageError: the ranks do not see each other's files.
        ModelMismatchError: the ranks save different models, optimizers or steps.
        OtherRankError: another rank failed. If one rank raises, all ranks do.
    """
    exchange = RankExchange()
    with synced_device() as random:
        request = validate_request(exchange, path, step, keep_last)
        incomplete = begin_save(exchange, request, model, optimizer, scheduler, extra, random)
        try:
            written = exchange.run_and_gather("write its file", lambda: asdict(incomplete.write()))
            saved = exchange.run_on_first_rank(
                "complete the checkpoint", lambda: incomplete.commit(records(written))
            )
        except Exception:
            incomplete.remove_on_failure(exchange)
            raise
    if exchange.rank == 0:  # the other ranks continue training
        incomplete.remove_old_checkpoints()
    return saved


def validate_request(
    exchange: RankExchange, path: str | os.PathLike, step: int, keep_last: int | None
) -> Request:
    """Validates the arguments on all ranks."""
    return exchange.run_on_each_rank(
        "save with these arguments", lambda: Request(os.fsdecode(path), step, keep_last)
    )


def records(written: list[dict[str, Any]]) -> list[FileRecord]:
    """The file records of all ranks, from the values that they sent as JSON."""
    return [FileRecord(**{**each, "digests": tuple(each["digests"])}) for each in written]
