"""Directories of ``torch.distributed.checkpoint``, written: from here to FSDP on GPUs.

The layout is the one that ``dcp.save({"model": ..., "optim": ...})`` gives the state dicts of
``torch.distributed.checkpoint.state_dict``: ``model.<name>``, ``optim.state.<name>.<key>`` and
``optim.param_groups.<i>.<option>``. Every rank writes its own elements, as boxes; rank 0 writes the
metadata, last, without which the directory is no checkpoint.
"""

from __future__ import annotations

import copy
import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..collectives.random_state import at_rest
from ..consolidate.errors import OutputError, SharedStorageError
from .dcp_writing import Contents, write_part
from .draft import eventually
from .full_optimizer import state_kinds
from .inventory import Held, Inventory
from .meeting import Meeting
from .optimizer_forms import saver_of
from .optimizers import members_of_groups, options
from .parts import agreed_inventory
from .protocol import unread_state_dict
from .unread import UnreadTensor

# What there is of a directory before its metadata.
_LEFT_OVER = re.compile(r"__\d+_\d+\.distcp|\.metadata\.tmp")


@at_rest()
def to_dcp(path: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Writes a directory that ``torch.distributed.checkpoint`` loads; call it on every rank.

    In torch, on any number of GPUs and with any parallelism::

        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=path)

    Nothing is gathered: every rank writes its own shards into files of up to 256 MiB, which is
    also what is in host memory at a time. Tied parameters are written once, under all names.

    Args:
        path: a directory that does not exist, is empty, or has leftovers of a writing that never
            ended; on a file system that all ranks share.

    Raises:
        OutputError: ``path`` has something in it, or cannot be written.
        SharedStorageError: a rank does not see the directory.
        TypeError, ValueError, ModelMismatchError: see :func:`full_state_dict` and
            :func:`full_optim_state_dict`.
        OtherRankError: one of these on another rank.
    """
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)
    contents = Contents()
    meeting.together("describe the model", lambda: _add_model(contents, model, inventory))
    if optimizer is not None:
        state_kinds(meeting, inventory, optimizer)
        meeting.together(
            "describe the optimizer", lambda: _add_optimizer(contents, inventory, optimizer)
        )
    folder = meeting.together("name the directory", lambda: _local(path))[0]
    meeting.first(f"make {folder}", lambda: _make(folder))
    meeting.together(f"see {folder}", lambda: _require_seen(folder))
    results = meeting.together(
        f"write to {folder}", lambda: write_part(folder, contents, inventory)
    )
    meeting.first(f"finish {folder}", lambda: _finish(folder, contents, results))


def _add_model(contents: Contents, model: nn.Module, inventory: Inventory) -> None:
    state = unread_state_dict(model, inventory)
    if state is None:
        raise ValueError(
            "state_dict() of the model, or a hook of it, computes with parameters, and to_dcp "
            "writes shards, which are gathered nowhere: use xla_fsdp.full_state_dict(model), and "
            "torch.distributed.checkpoint.save of that on rank 0, or save_checkpoint"
        )
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, UnreadTensor):
            names.setdefault(value.source, []).append(name)
        else:
            contents.add(("model", name), value)
    for source, own in names.items():
        if isinstance(source, Held):
            contents.add_run(("model", own[0]), source, source.holder)
        else:
            contents.add(("model", own[0]), source.value())
        contents.alias("model", own)


def _add_optimizer(
    contents: Contents, inventory: Inventory, optimizer: torch.optim.Optimizer
) -> None:
    if saver_of(optimizer) is not None:
        raise TypeError(
            f"the state of {type(optimizer).__name__} has no values of the parameters' shapes, and "
            "torch.distributed.checkpoint no other form for it: save_checkpoint and "
            "full_optim_state_dict have"
        )
    for held in inventory.parameters:
        for key, value in optimizer.state.get(held.holder, {}).items():
            path = ("optim", "state", held.name, key)
            if isinstance(value, torch.Tensor) and value.shape == held.holder.shape:
                contents.add_run(path, held, value)
            else:
                contents.add(path, value)
    groups = zip(optimizer.param_groups, members_of_groups(inventory, optimizer), strict=True)
    for number, (group, members) in enumerate(groups):
        for name, value in options(group).items():
            contents.add(("optim", "param_groups", number, name), copy.deepcopy(value))
        names = [held.name for held in members]
        contents.add(("optim", "param_groups", number, "params"), names)


def _local(path: Any) -> str:
    folder = os.fspath(path)
    if "://" in folder:
        raise ValueError(f"path {folder!r}: torch.distributed.checkpoint needs a local directory")
    return os.path.abspath(folder)


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        names = os.listdir(folder)
        if not all(map(_LEFT_OVER.fullmatch, names)):
            raise OutputError(f"{folder}: is not empty; write to a new directory")
        for name in names:  # of a writing that never ended
            os.unlink(os.path.join(folder, name))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error}") from error


def _require_seen(folder: str) -> None:
    if not eventually(lambda: os.path.isdir(folder)):
        raise SharedStorageError(
            f"{folder}: was made by rank 0, but is not here; all ranks must write to one file "
            "system"
        )


def _finish(folder: str, contents: Contents, results: list[list[Any]]) -> None:
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in contents.shapes}
    found: list[WriteResult] = []
    for key, box, size, place in (one for each in results for one in each):
        path = os.path.join(folder, place[0])
        if not eventually(partial(os.path.isfile, path)):
            raise SharedStorageError(
                f"{path}: was written by another rank, but is not here; all ranks must write to "
                "one file system"
            )
        info = filesystem._StorageInfo(*place)  # what FileSystemReader expects there
        if box is None:
            found.append(WriteResult(MetadataIndex(key), size, info))
            continue
        offsets, sizes = map(torch.Size, box)
        for name in (key, *contents.aliases.get(key, ())):
            found.append(WriteResult(MetadataIndex(name, offsets), size, info))
        chunks[key].append(ChunkStorageMetadata(offsets, sizes))
    described: dict[str, Any] = {key: BytesStorageMetadata() for key in contents.objects}
    for key, (shape, dtype) in contents.shapes.items():
        tensor = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(shape), chunks[key]
        )
        for name in (key, *contents.aliases.get(key, ())):
            described[name] = replace(tensor)
    try:
        FileSystemWriter(folder).finish(Metadata(described, contents.paths), [found])
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error
