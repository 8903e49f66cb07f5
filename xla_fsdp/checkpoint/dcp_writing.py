"""``to_dcp``: writes a directory that ``torch.distributed.checkpoint`` loads."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from ..consolidate.format import values
from ..consolidate.format.manifest import State
from ..consolidate.format.store import path_text
from .contents import HostCopies
from .dcp_reading import IndexRange, split_index_range
from .inventory import Inventory, ParameterShard, agree_on_inventory
from .optimizer_state import (
    OptimizerStateShard,
    ParameterGroups,
    agree_on_state,
    options,
    state_converter_of,
)
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
    contents: dict[str, _DcpValue] = exchange.run_on_each_rank(
        "describe the model",
        lambda: {entry.keys[0]: entry for entry in _model_values(model, inventory)},
    )
    if optimizer is not None:
        state = agree_on_state(exchange, inventory, optimizer)
        contents |= exchange.run_on_each_rank(
            "describe the optimizer",
            lambda: {entry.keys[0]: entry for entry in _optimizer_values(optimizer, *state)},
        )
    folder = exchange.run_and_gather("name the directory", lambda: _local_folder(path))[0]
    exchange.run_on_first_rank(f"make {folder}", lambda: _make_folder(folder))
    exchange.run_and_gather(f"see {folder}", lambda: _require_folder_exists(folder))
    results = exchange.run_and_gather(
        f"write to {folder}", lambda: _write_part(folder, contents, inventory.rank)
    )
    exchange.run_on_first_rank(
        f"finish {folder}", lambda: _write_metadata(folder, contents, results)
    )


@dataclass(frozen=True)
class _DcpValue:
    """A value of the checkpoint.

    ``paths``: for each of its keys, the parts that make up the key. ``shard``: the parameter, if
    ``value`` is this rank's part of a tensor of its shape. Other values are replicated.
    """

    paths: list[_Path]
    value: Any
    shard: ParameterShard | None = None

    @property
    def keys(self) -> list[str]:
        return [".".join(map(str, path)) for path in self.paths]

    def blocks(self, rank: int, copies: HostCopies) -> Iterator[tuple[IndexRange | None, Any]]:
        """What this rank writes: index ranges with their elements, or ``None`` with the value.

        Rank 0 writes replicated values and empty tensors.
        """
        shard, value = self.shard, self.value
        if shard is None and rank == 0:
            if isinstance(value, torch.Tensor):
                yield _full_range(value.shape), value.detach().cpu()
            else:
                yield None, value
        elif shard is not None and shard.numel == 0 and rank == 0:
            yield (
                _full_range(shard.shape),
                torch.empty(shard.shape, dtype=value.dtype, device="cpu"),
            )
        elif shard is not None and shard.writes:
            for block in split_index_range(shard.shape, shard.begin, shard.end):
                first = shard.at + block.begin - shard.begin
                part = copies.flat(value)[first : first + block.sizes.numel()]
                yield block, part.view(block.sizes)

    def described(self, chunks: list[ChunkStorageMetadata]) -> Any:
        if not isinstance(self.value, torch.Tensor):
            return BytesStorageMetadata()
        shape = self.value.shape if self.shard is None else self.shard.shape
        properties = TensorProperties(dtype=self.value.dtype)
        return TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _full_range(shape: Sequence[int]) -> IndexRange:
    return IndexRange(torch.Size([0] * len(shape)), torch.Size(shape), 0)


def _split_value(path: _Path, value: Any) -> Iterator[_DcpValue]:
    """The entries of a value, which torch takes apart as here."""
    if _is_taken_apart(value):
        each = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in each:
            yield from _split_value((*path, name if isinstance(value, list) else str(name)), inner)
    else:
        yield _DcpValue([path], value)


def _is_taken_apart(value: Any) -> bool:
    """Whether torch saves the elements of ``value`` as separate entries."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(
        isinstance(inner, torch.Tensor) or _is_taken_apart(inner) for inner in value
    )


def _model_values(model: nn.Module, inventory: Inventory) -> Iterator[_DcpValue]:
    state = placeholder_state_dict(model, inventory)
    if state is None:
        raise ValueError(
            "state_dict() of the model, or one of its hooks, computes with parameters. to_dcp "
            "cannot save such a model, because it never gathers parameters. Use "
            "xla_fsdp.full_state_dict(model) and torch.distributed.checkpoint.save of the result "
            "on rank 0, or use save_checkpoint."
        )
    paths: dict[Any, list[_Path]] = {}
    for name, value in state.items():
        if isinstance(value, PlaceholderTensor):
            paths.setdefault(value.source, []).append(("model", name))
        else:
            yield from _split_value(("model", name), value)
    for source, own in paths.items():
        if isinstance(source, ParameterShard):
            yield _DcpValue(own, source.holder, source)
        else:
            yield _DcpValue(own, source.value())


def _optimizer_values(
    optimizer: torch.optim.Optimizer,
    groups: ParameterGroups,
    state: Mapping[str, State],
    tensors: Sequence[OptimizerStateShard],
) -> Iterator[_DcpValue]:
    if state_converter_of(optimizer) is not None:
        raise TypeError(
            f"the state of {type(optimizer).__name__} does not have the shapes of the parameters, "
            "which torch.distributed.checkpoint requires. Use save_checkpoint or "
            "full_optim_state_dict for this optimizer."
        )
    for each in tensors:
        for shard in each.parameters:
            yield _DcpValue([("optim", "state", shard.name, each.key)], each.tensor, shard)
    for name, own in state.items():
        for key, encoded in own.single.items():
            yield from _split_value(
                ("optim", "state", name, key), values.decode(encoded["value"], key)
            )
    for number, (group, members) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name, value in options(group).items():
            yield from _split_value(("optim", "param_groups", number, name), copy.deepcopy(value))
        names = [shard.name for shard in members]
        yield _DcpValue([("optim", "param_groups", number, "params")], names)


def _local_folder(path: Any) -> str:
    folder = path_text(path)
    if "://" in folder:
        raise ValueError(
            f"path {folder!r} is a URL, but torch.distributed.checkpoint needs a local directory. "
            "Pass a local or mounted path."
        )
    return os.path.abspath(folder)


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        names = os.listdir(folder)
        if not all(map(_LEFT_OVER.fullmatch, names)):
            raise OutputError(f"{folder}: is not empty. Write to a new directory.")
        for name in names:
            os.unlink(os.path.join(folder, name))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error}") from error


def _require_folder_exists(folder: str) -> None:
    if not wait_until(lambda: os.path.isdir(folder)):
        raise SharedStorageError(
            f"{folder}: rank 0 made it, but this rank does not see it. Write to a file system that "
            "all hosts share."
        )


def _write_part(folder: str, contents: Mapping[str, _DcpValue], rank: int) -> list[Any]:
    """Writes this rank's file. Returns for each value its key, index range, and where it is."""
    name, copies = f"__{rank}_0.distcp", HostCopies()
    written: list[Any] = []
    try:
        with open(os.path.join(folder, name), "xb") as file:
            for key, entry in contents.items():
                for block, value in entry.blocks(rank, copies):
                    begin = file.tell()
                    # torch.save writes all elements that a view refers to.
                    torch.save(value if block is None else value.clone(), file)
                    place = [name, begin, file.tell() - begin]
                    index_range = block and [list(block.offsets), list(block.sizes)]
                    written.append([key, index_range, place])
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error
    return written


def _write_metadata(
    folder: str, contents: Mapping[str, _DcpValue], results: list[list[Any]]
) -> None:
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in contents}
    found: list[WriteResult] = []
    for key, index_range, place in (one for each in results for one in each):
        path = os.path.join(folder, place[0])
        if not wait_until(partial(os.path.isfile, path)):
            raise SharedStorageError(
                f"{path}: another rank wrote it, but rank 0 does not see it. Write to a file "
                "system that all hosts share."
            )
        info = filesystem._StorageInfo(*place)  # the type that FileSystemReader expects
        offsets = None
        if index_range is not None:
            offsets, sizes = map(torch.Size, index_range)
            chunks[key].append(ChunkStorageMetadata(offsets, sizes))
        for name in contents[key].keys:
            found.append(WriteResult(MetadataIndex(name, offsets), info.length, info))
    described, paths = {}, {}
    for key, entry in contents.items():
        for name, parts in zip(entry.keys, entry.paths, strict=True):
            described[name], paths[name] = entry.described(chunks[key]), parts
    try:
        FileSystemWriter(folder).finish(Metadata(described, paths), [found])
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error}") from error
