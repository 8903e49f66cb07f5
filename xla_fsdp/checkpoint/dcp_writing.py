"""``to_dcp``: writes a directory that ``torch.distributed.checkpoint`` loads."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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

_Path = tuple[str | int, ...]


@synced_device()
def to_dcp(path: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Writes a directory that ``torch.distributed.checkpoint`` loads. Call it on every rank.

    torch's ``get_state_dict`` and ``dcp.load`` of ``{"model": ..., "optim": ...}`` read it, on any
    number of GPUs and with any parallelism. Every rank writes its shards into one file, with one
    tensor in host memory at a time.

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
    for key, block, place in (one for each in results for one in each):
        path = os.path.join(folder, place[0])
        if not wait_until(partial(os.path.isfile, path)):
            raise SharedStorageError(
                f"{path}: another rank wrote it, but rank 0 does not see it. Write to a file "
                "system that all hosts share."
            )
        info = filesystem._StorageInfo(*place)  # the type that FileSystemReader expects
        if block is None:
            found.append(WriteResult(MetadataIndex(key), info.length, info))
            continue
        offsets, sizes = map(torch.Size, block)
        for name in (key, *contents.aliases.get(key, ())):
            found.append(WriteResult(MetadataIndex(name, offsets), info.length, info))
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


class _DcpContents:
    """The values that this rank writes, and the keys of the complete checkpoint.

    ``values`` are replicated, ``shards`` are this rank's parts. ``paths``: the parts that make up a
    key. ``aliases``: other keys of the same tensor.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.shards: dict[str, tuple[ParameterShard, torch.Tensor]] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.paths: dict[str, _Path] = {}
        self.aliases: dict[str, list[str]] = {}

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

    def items(self, inventory: Inventory) -> Iterator[tuple[str, IndexRange | None, Any]]:
        """What this rank writes: key, place in the tensor (``None`` for other values), value.

        Rank 0 also writes replicated values and empty tensors.
        """
        for key, value in self.values.items() if inventory.rank == 0 else ():
            if isinstance(value, torch.Tensor):
                yield key, _all(value.shape), value.detach().cpu()
            else:
                yield key, None, value
        copies = HostCopies()
        for key, (shard, value) in self.shards.items():
            if shard.writes:
                for block in split_index_range(shard.shape, shard.begin, shard.end):
                    first = shard.at + block.begin - shard.begin
                    part = copies.flat(value)[first : first + block.sizes.numel()]
                    yield key, block, part.view(block.sizes)
            if shard.numel == 0 and inventory.rank == 0:
                yield key, _all(shard.shape), torch.empty(shard.shape, dtype=value.dtype)


def _is_taken_apart(value: Any) -> bool:
    """Whether torch saves the elements of ``value`` as separate entries."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(
        isinstance(inner, torch.Tensor) or _is_taken_apart(inner) for inner in value
    )


def _all(shape: Sequence[int]) -> IndexRange:
    return IndexRange(torch.Size([0] * len(shape)), torch.Size(shape), 0)


def _write_part(folder: str, contents: _DcpContents, inventory: Inventory) -> list[Any]:
    """Writes this rank's file. Returns for each value its key, place in the tensor and place."""
    name = f"__{inventory.rank}_0.distcp"
    written: list[Any] = []
    try:
        with open(os.path.join(folder, name), "xb") as file:
            for key, block, value in contents.items(inventory):
                begin = file.tell()
                # torch.save writes all elements that a view refers to.
                torch.save(value if block is None else value.clone(), file)
                place = [name, begin, file.tell() - begin]
                written.append([key, block and [list(block.offsets), list(block.sizes)], place])
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error
    return written
