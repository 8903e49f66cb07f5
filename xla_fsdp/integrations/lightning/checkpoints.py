"""Checkpoints of the Trainer: one file of full tensors, or a folder of all ranks' shards.

A sharded checkpoint stores the model and the optimizers in this package's format. It stores all
else that Lightning saves (loops, callbacks, schedulers, hyperparameters) as bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem

from ...checkpoint.full_state import (
    full_optim_state_dict,
    full_state_dict,
    load_full_optim_state_dict,
    load_full_state_dict,
)
from ...checkpoint.loading import load_checkpoint
from ...checkpoint.rank_exchange import RankExchange
from ...checkpoint.saving import save_checkpoint
from ...collectives.random_state import synced_device
from ...consolidate.format import folders, values
from ...consolidate.format.manifest import NAME
from ...consolidate.format.reader import ShardedCheckpoint
from ...consolidate.format.store import join
from ..early_optimizers import joined
from .collectives import on_host

# The key of a checkpoint that was read from a folder: its value is the folder.
_FOLDER = "xla_fsdp_folder"


def state_of_model(strategy: Any) -> dict[str, Any]:
    return {} if _is_sharded(strategy) else full_state_dict(strategy.model)


def state_of_optimizer(strategy: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer state by parameter names; an unsharded optimizer uses only their order."""
    return {} if _is_sharded(strategy) else full_optim_state_dict(strategy.model, optimizer)


@synced_device()
def save(strategy: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
    """Saves ``checkpoint``, which the Trainer has collected; every rank calls it.

    Raises:
        ValueError: at ``path`` there is a file instead of a folder, or the reverse.
        OtherRankError: another rank could not save.
    """
    exchange = RankExchange()
    wanted = os.fspath(path)
    require_kind(exchange, wanted, folder=_is_sharded(strategy))
    if not _is_sharded(strategy):
        write = strategy.checkpoint_io.save_checkpoint
        exchange.run_on_first_rank(
            f"write {wanted}",
            lambda: write(on_host(checkpoint), path, storage_options=storage_options),
        )
        return
    if storage_options is not None:
        raise ValueError("storage_options have no effect on sharded checkpoints: leave them out")
    rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
    with_optimizers = "optimizer_states" in checkpoint and strategy.optimizers
    save_checkpoint(
        wanted,
        strategy.model,
        joined(strategy.optimizers) if with_optimizers else None,
        step=checkpoint["global_step"],
        extra={"lightning": packed(rest)},
        keep_last=1,
    )


def read(strategy: Any, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Reads the Trainer's part of a checkpoint.

    The caller holds a lock that only one rank can have, so there must be no collective here.
    """
    wanted = os.fspath(path)
    if not get_filesystem(wanted).isdir(wanted):
        return strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    folder, extra = extra_of(wanted)
    if not isinstance(extra, dict) or "lightning" not in extra:
        raise ValueError(
            f"{folder} was not saved by a Trainer, so it does not contain the progress of the "
            "training. Build the model and call xla_fsdp.load_checkpoint, or fit without ckpt_path"
        )
    return {**unpacked(extra["lightning"], weights_only), "state_dict": {}, _FOLDER: folder}


def load_model(strategy: Any, checkpoint: Mapping[str, Any], strict: bool) -> None:
    folder = checkpoint.get(_FOLDER)
    if folder is None:
        load_full_state_dict(strategy.model, checkpoint["state_dict"], strict=strict)
    else:
        load_checkpoint(folder, strategy.model, strict=strict, restore_rng=False)


def load_optimizers(strategy: Any, checkpoint: Mapping[str, Any]) -> None:
    states = checkpoint["optimizer_states"]
    if len(states) != len(strategy.optimizers):
        raise ValueError(
            f"the checkpoint has the state of {len(states)} optimizers, but configure_optimizers "
            f"returned {len(strategy.optimizers)}. Return the same number of optimizers"
        )
    if states and _FOLDER in checkpoint:
        both = joined(strategy.optimizers)
        strict = strategy.lightning_module.strict_loading
        options = {"strict": strict, "restore_rng": False, "weights": False}
        load_checkpoint(checkpoint[_FOLDER], strategy.model, both, **options)
        give_back(both)
        return
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        load_full_optim_state_dict(strategy.model, optimizer, state)


def require_kind(exchange: RankExchange, path: str, folder: bool) -> None:
    """Raises ValueError on every rank if ``path`` is a file instead of a folder, or the reverse."""

    def look() -> None:
        files = get_filesystem(path)
        if files.exists(path) and files.isdir(path) != folder:
            raise ValueError(
                f"{path} is a {'file' if folder else 'folder'}, but with state_dict_type="
                f"{'sharded' if folder else 'full'!r} a checkpoint is a "
                f"{'folder' if folder else 'file'}. Remove it, or save to another path"
            )

    exchange.run_on_first_rank(f"save to {path}", look)


def extra_of(path: str) -> tuple[str, Any]:
    """The folder of the checkpoint at ``path``, and its ``extra``; a single rank may call it."""
    _, name = folders.resolve_checkpoint(path)
    whole = path.rstrip("/") or "/"
    last = name.rpartition("/")[2]
    folder = whole if whole.rpartition("/")[2] == last else f"{whole}/{last}"
    found = ShardedCheckpoint(folder)
    return folder, values.decode(found.manifest.extra, join(folder, NAME))


def packed(rest: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(on_host(rest), buffer)
    return buffer.getvalue()


def unpacked(data: bytes, weights_only: bool | None) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def give_back(optimizer: Any) -> None:
    """Returns the loaded state to the optimizers that :func:`~..early_optimizers.joined` joined."""
    if hasattr(optimizer, "give_back"):
        optimizer.give_back()


def _is_sharded(strategy: Any) -> bool:
    return strategy.settings.state_dict_type == "sharded"
