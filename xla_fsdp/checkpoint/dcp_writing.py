"""Directories of ``torch.distributed.checkpoint``, written: from here to FSDP on GPUs.

The layout is the one that ``dcp.save({"model": ..., "optim": ...})`` gives the state dicts of
``torch.distributed.checkpoint.state_dict``: ``model.<name>``, ``optim.state.<name>.<key>`` and
``optim.param_groups.<i>.<option>``. Every rank writes its own elements, as boxes; rank 0 writes the
metadata, last, without which the directory is no checkpoint.
"""

from __future__ import annotations

import copy
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..collectives.random_state import at_rest
from ..consolidate.errors import OutputError, SharedStorageError
from ..sharding.sharded_parameter import local
from .boxes import Box, boxes
from .draft import eventually
from .full_optimizer import state_kinds
from .inventory import Held, Inventory
from .meeting import Meeting
from .optimizer_forms import saver_of
from .optimizers import local_state, members_of_groups, options
from .parts import agreed_inventory
from .protocol import unread_state_dict
from .unread import UnreadTensor

# What there is of a directory before its metadata.
_LEFT_OVER = re.compile(r"__\d+_\d+\.distcp|\.metadata\.tmp")

# torch keeps what it writes into one file in host memory.
FILE_BYTES = 1 << 28

_Path = tuple[str | int, ...]


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
    contents = _DcpContents()
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
        f"write to {folder}", lambda: _write_part(folder, contents, inventory)
    )
    meeting.first(f"finish {folder}", lambda: _finish(folder, contents, results))


def _add_model(contents: _DcpContents, model: nn.Module, inventory: Inventory) -> None:
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
    contents: _DcpContents, inventory: Inventory, optimizer: torch.optim.Optimizer
) -> None:
    if saver_of(optimizer) is not None:
        raise TypeError(
            f"the state of {type(optimizer).__name__} has no values of the parameters' shapes, and "
            "torch.distributed.checkpoint no other form for it: save_checkpoint and "
            "full_optim_state_dict have"
        )
    for held in inventory.parameters:
        for key, value in local_state(optimizer, held.holder).items():
            path = ("optim", "state", held.name, key)
            if isinstance(value, torch.Tensor) and value.shape == local(held.holder).shape:
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


def _finish(folder: str, contents: _DcpContents, results: list[list[Any]]) -> None:
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


@dataclass
class _DcpContents:
    """What this rank writes, and what the checkpoint holds in all.

    Attributes:
        whole: tensors whose value every rank can give, by key (0-d ones, and buffers).
        objects: what is no tensor.
        runs: of every sharded tensor, the parameter it belongs to, and a tensor that has the
            holder's shape.
        shapes: shape and dtype of every tensor.
        paths: of every key, the names it was made of.
        aliases: further keys of the same tensor.
    """

    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, tuple[Held, torch.Tensor]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    paths: dict[str, _Path] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)

    def key(self, *path: str | int) -> str:
        key = ".".join(map(str, path))
        self.paths[key] = path
        return key

    def alias(self, top: str, names: Sequence[str]) -> None:
        """The tensor under the first of ``names`` is there under all of them."""
        first, *more = [self.key(top, name) for name in names]
        self.aliases[first] = more

    def add(self, path: _Path, value: Any) -> None:
        """One tensor or object, the same on every rank."""
        if _is_taken_apart(value):
            each = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, inner in each:
                self.add((*path, name if isinstance(value, list) else str(name)), inner)
            return
        key = self.key(*path)
        if isinstance(value, torch.Tensor):
            self.whole[key] = value
            self.shapes[key] = tuple(value.shape), value.dtype
        else:
            self.objects[key] = value

    def add_run(self, path: _Path, held: Held, value: torch.Tensor) -> None:
        """This rank's part of a parameter or of something of its shape."""
        key = self.key(*path)
        self.runs[key] = held, value
        self.shapes[key] = held.shape, value.dtype


def _is_taken_apart(value: Any) -> bool:
    """Whether torch saves what is in ``value`` one by one."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(
        isinstance(inner, torch.Tensor) or _is_taken_apart(inner) for inner in value
    )


class _Planner(DefaultSavePlanner):
    """Gives torch's writer what it is to write, when it is."""

    def __init__(self, contents: _DcpContents):
        super().__init__()
        self.contents = contents
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def items(self, inventory: Inventory) -> Iterator[WriteItem]:
        contents = self.contents
        if inventory.rank == 0:
            for key in contents.objects:
                yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
            for key, value in contents.whole.items():
                yield self._item(key, _all(value.shape))
        for key, (held, _) in contents.runs.items():
            if held.writes:
                for box in boxes(held.shape, held.begin, held.end):
                    yield self._item(key, box)
            if held.numel == 0 and inventory.rank == 0:
                yield self._item(key, _all(held.shape))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key, contents = write_item.index.fqn, self.contents
        if key in contents.objects:
            data = io.BytesIO()
            torch.save(contents.objects[key], data)
            return data
        if key in contents.whole:
            return contents.whole[key].detach().cpu()
        held, value = contents.runs[key]
        # Parts follow each other: one copy from the device serves all of a shard.
        if self._last is None or self._last[0] is not value:
            self._last = value, local(value.detach()).cpu().reshape(-1)
        assert write_item.tensor_data is not None  # none of BYTE_IO only
        chunk = write_item.tensor_data.chunk
        first = held.at + _first_element(held.shape, chunk.offsets) - held.begin
        if not chunk.sizes.numel():
            first = 0
        return self._last[1][first : first + chunk.sizes.numel()].view(chunk.sizes)

    def _item(self, key: str, box: Box) -> WriteItem:
        shape, dtype = self.contents.shapes[key]
        data = TensorWriteData(
            ChunkStorageMetadata(box.offsets, box.sizes),
            TensorProperties(dtype=dtype),
            torch.Size(shape),
        )
        return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)


def _all(shape: tuple[int, ...]) -> Box:
    return Box(torch.Size([0] * len(shape)), torch.Size(shape), 0)


def _first_element(shape: tuple[int, ...], offsets: torch.Size) -> int:
    number = 0
    for size, offset in zip(shape, offsets, strict=True):
        number = number * size + offset
    return number


def _write_part(folder: str, contents: _DcpContents, inventory: Inventory) -> list[Any]:
    """Writes this rank's files; what is in them, as JSON for rank 0."""
    planner, written = _Planner(contents), []
    batches: list[list[WriteItem]] = [[]]
    size = 0
    for item in planner.items(inventory):
        data = item.tensor_data
        own = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        if size + own > FILE_BYTES and batches[-1]:
            batches.append([])
            size = 0
        size += own
        batches[-1].append(item)
    for number, items in enumerate(batches):
        # A file is named by the number of its plan.
        plans = [SavePlan([])] * (inventory.rank + number * inventory.world_size) + [
            SavePlan(items)
        ]
        writer = FileSystemWriter(folder)
        plan = writer.prepare_global_plan(plans)[-1]
        sizes = {item.index: item.tensor_data.chunk.sizes for item in items if item.tensor_data}
        try:
            results = writer.write_data(plan, planner).wait() if items else []
        except (OSError, RuntimeError) as error:
            raise OutputError(f"{folder}: cannot be written: {error}") from error
        for result in results:
            index, where = result.index, result.storage_data
            box = None if index.offset is None else [list(index.offset), list(sizes[index])]
            place = [where.relative_path, where.offset, where.length]
            written.append([index.fqn, box, result.size_in_bytes, place])
    return written
