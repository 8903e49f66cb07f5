"""``to_dcp``: writes a directory that ``torch.distributed.checkpoint`` loads."""

from __future__ import annotations

import copy
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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

from ..collectives.random_state import synced_device
from ..consolidate.errors import OutputError, SharedStorageError
from ..sharding.sharded_parameter import local
from .contents import HostCopies
from .dcp_reading import IndexRange, split_index_range
from .full_state import state_kinds
from .inventory import Inventory, ParameterShard, agree_on_inventory
from .optimizers import local_state, members_of_groups, options, state_converter_of
from .protocol import PlaceholderTensor, placeholder_state_dict
from .rank_exchange import RankExchange, wait_until

_LEFT_OVER = re.compile(r"__\d+_\d+\.distcp|\.metadata\.tmp")

# torch collects the content of a file in host memory before writing it.
FILE_BYTES = 1 << 28

_Path = tuple[str | int, ...]


@synced_device()
def to_dcp(path: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Writes a directory that ``torch.distributed.checkpoint`` loads. Call it on every rank.

    torch's ``get_state_dict`` and ``dcp.load`` of ``{"model": ..., "optim": ...}`` read it, on any
    number of GPUs and with any parallelism. Every rank writes its shards into files of up to 256
    MiB, one of them in host memory at a time.

    Args:
        path: a directory on a file system that all ranks share: new, empty, or with only files of
            an earlier call that did not finish, which are removed.

    Raises:
        OutputError: ``path`` has other files in it, or cannot be written.
        SharedStorageError: a rank does not see the directory.
        TypeError, ValueError, ModelMismatchError: see :func:`full_state_dict` and
            :func:`full_optim_state_dict`.
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    contents = _DcpContents()
    exchange.run_and_gather("describe the model", lambda: _add_model(contents, model, inventory))
    if optimizer is not None:
        state_kinds(exchange, inventory, optimizer)
        exchange.run_and_gather(
            "describe the optimizer", lambda: _add_optimizer(contents, inventory, optimizer)
        )
    folder = exchange.run_and_gather("name the directory", lambda: _local(path))[0]
    exchange.run_on_first_rank(f"make {folder}", lambda: _make(folder))
    exchange.run_and_gather(f"see {folder}", lambda: _require_seen(folder))
    results = exchange.run_and_gather(
        f"write to {folder}", lambda: _write_part(folder, contents, inventory)
    )
    exchange.run_on_first_rank(f"finish {folder}", lambda: _finish(folder, contents, results))


def _add_model(contents: _DcpContents, model: nn.Module, inventory: Inventory) -> None:
    state = placeholder_state_dict(model, inventory)
    if state is None:
        raise ValueError(
            "state_dict() of the model, or one of its hooks, computes with parameters. to_dcp "
            "cannot save such a model, because it never gathers parameters. Use "
            "xla_fsdp.full_state_dict(model) and torch.distributed.checkpoint.save of the result "
            "on rank 0, or use save_checkpoint."
        )
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, PlaceholderTensor):
            names.setdefault(value.source, []).append(name)
        else:
            contents.add(("model", name), value)
    for source, own in names.items():
        if isinstance(source, ParameterShard):
            contents.add_shard(("model", own[0]), source, source.holder)
        else:
            contents.add(("model", own[0]), source.value())
        contents.alias("model", own)


def _add_optimizer(
    contents: _DcpContents, inventory: Inventory, optimizer: torch.optim.Optimizer
) -> None:
    if state_converter_of(optimizer) is not None:
        raise TypeError(
            f"the state of {type(optimizer).__name__} does not have the shapes of the parameters, "
            "which torch.distributed.checkpoint requires. Use save_checkpoint or "
            "full_optim_state_dict for this optimizer."
        )
    for shard in inventory.parameters:
        for key, value in local_state(optimizer, shard.holder).items():
            path = ("optim", "state", shard.name, key)
            if isinstance(value, torch.Tensor) and value.shape == local(shard.holder).shape:
                contents.add_shard(path, shard, value)
            else:
                contents.add(path, value)
    groups = zip(optimizer.param_groups, members_of_groups(inventory, optimizer), strict=True)
    for number, (group, members) in enumerate(groups):
        for name, value in options(group).items():
            contents.add(("optim", "param_groups", number, name), copy.deepcopy(value))
        names = [shard.name for shard in members]
        contents.add(("optim", "param_groups", number, "params"), names)


def _local(path: Any) -> str:
    folder = os.fspath(path)
    if "://" in folder:
        raise ValueError(
            f"path {folder!r} is a URL, but torch.distributed.checkpoint needs a local directory. "
            "Pass a local or mounted path."
        )
    return os.path.abspath(folder)


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        names = os.listdir(folder)
        if not all(map(_LEFT_OVER.fullmatch, names)):
            raise OutputError(f"{folder}: is not empty. Write to a new directory.")
        for name in names:
            os.unlink(os.path.join(folder, name))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error}") from error


def _require_seen(folder: str) -> None:
    if not wait_until(lambda: os.path.isdir(folder)):
        raise SharedStorageError(
            f"{folder}: rank 0 made it, but this rank does not see it. Write to a file system that "
            "all hosts share."
        )


def _finish(folder: str, contents: _DcpContents, results: list[list[Any]]) -> None:
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in contents.shapes}
    found: list[WriteResult] = []
    for key, index_range, size, place in (one for each in results for one in each):
        path = os.path.join(folder, place[0])
        if not wait_until(partial(os.path.isfile, path)):
            raise SharedStorageError(
                f"{path}: another rank wrote it, but rank 0 does not see it. Write to a file "
                "system that all hosts share."
            )
        info = filesystem._StorageInfo(*place)  # the type that FileSystemReader expects
        if index_range is None:
            found.append(WriteResult(MetadataIndex(key), size, info))
            continue
        offsets, sizes = map(torch.Size, index_range)
        for name in (key, *contents.aliases.get(key, ())):
            found.append(WriteResult(MetadataIndex(name, offsets), size, info))
        chunks[key].append(ChunkStorageMetadata(offsets, sizes))
    described: dict[str, Any] = {
        key: BytesStorageMetadata() for key in contents.values if key not in contents.shapes
    }
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


class _DcpContents(DefaultSavePlanner):
    """The values that this rank writes, and the keys of the complete checkpoint.

    ``values`` are replicated, ``shards`` are this rank's parts. ``paths``: the parts that make up a
    key. ``aliases``: other keys of the same tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self.shards: dict[str, tuple[ParameterShard, torch.Tensor]] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.paths: dict[str, _Path] = {}
        self.aliases: dict[str, list[str]] = {}
        self._copies = HostCopies()

    def key(self, *path: str | int) -> str:
        key = ".".join(map(str, path))
        self.paths[key] = path
        return key

    def alias(self, top: str, names: Sequence[str]) -> None:
        first, *more = [self.key(top, name) for name in names]
        self.aliases[first] = more

    def add(self, path: _Path, value: Any) -> None:
        if _is_taken_apart(value):
            each = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, inner in each:
                self.add((*path, name if isinstance(value, list) else str(name)), inner)
            return
        key = self.key(*path)
        self.values[key] = value
        if isinstance(value, torch.Tensor):
            self.shapes[key] = tuple(value.shape), value.dtype

    def add_shard(self, path: _Path, shard: ParameterShard, value: torch.Tensor) -> None:
        """Adds this rank's part of a parameter, or of an optimizer state of the same shape."""
        key = self.key(*path)
        self.shards[key] = shard, value
        self.shapes[key] = shard.shape, value.dtype

    def items(self, inventory: Inventory) -> Iterator[WriteItem]:
        """What this rank writes. Rank 0 also writes replicated values and empty tensors."""
        for key in self.values if inventory.rank == 0 else ():
            if key in self.shapes:
                yield self._item(key, _all(self.shapes[key][0]))
            else:
                yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        for key, (shard, _) in self.shards.items():
            if shard.writes:
                for index_range in split_index_range(shard.shape, shard.begin, shard.end):
                    yield self._item(key, index_range)
            if shard.numel == 0 and inventory.rank == 0:
                yield self._item(key, _all(shard.shape))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if key in self.values and key in self.shapes:
            value: torch.Tensor = self.values[key].detach().cpu()
            return value
        if key in self.values:
            data = io.BytesIO()
            torch.save(self.values[key], data)
            return data
        shard, value = self.shards[key]
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        first = shard.at - shard.begin
        for place, offset in enumerate(chunk.offsets):
            first += offset * math.prod(shard.shape[place + 1 :])
        if not chunk.sizes.numel():
            first = 0
        flat = self._copies.flat(value)
        return flat[first : first + chunk.sizes.numel()].view(chunk.sizes)

    def _item(self, key: str, index_range: IndexRange) -> WriteItem:
        shape, dtype = self.shapes[key]
        data = TensorWriteData(
            ChunkStorageMetadata(index_range.offsets, index_range.sizes),
            TensorProperties(dtype=dtype),
            torch.Size(shape),
        )
        return WriteItem(
            MetadataIndex(key, index_range.offsets), WriteItemType.SHARD, tensor_data=data
        )


def _is_taken_apart(value: Any) -> bool:
    """Whether torch saves the elements of ``value`` as separate entries."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(
        isinstance(inner, torch.Tensor) or _is_taken_apart(inner) for inner in value
    )


def _all(shape: tuple[int, ...]) -> IndexRange:
    return IndexRange(torch.Size([0] * len(shape)), torch.Size(shape), 0)


def _write_part(folder: str, contents: _DcpContents, inventory: Inventory) -> list[Any]:
    written: list[Any] = []
    batches: list[list[WriteItem]] = [[]]
    size = 0
    for item in contents.items(inventory):
        data = item.tensor_data
        own = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        if size + own > FILE_BYTES and batches[-1]:
            batches.append([])
            size = 0
        size += own
        batches[-1].append(item)
    for number, items in enumerate(batches):
        # torch names a file by the index of its plan.
        plans = [SavePlan([])] * (inventory.rank + number * inventory.world_size) + [
            SavePlan(items)
        ]
        writer = FileSystemWriter(folder)
        plan = writer.prepare_global_plan(plans)[-1]
        sizes = {item.index: item.tensor_data.chunk.sizes for item in items if item.tensor_data}
        try:
            results = writer.write_data(plan, contents).wait() if items else []
        except (OSError, RuntimeError) as error:
            raise OutputError(f"{folder}: cannot be written: {error}") from error
        for result in results:
            index, where = result.index, result.storage_data
            index_range = None if index.offset is None else [list(index.offset), list(sizes[index])]
            place = [where.relative_path, where.offset, where.length]
            written.append([index.fqn, index_range, result.size_in_bytes, place])
    return written
