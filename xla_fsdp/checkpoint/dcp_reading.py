"""Directories of ``torch.distributed.checkpoint``, read: from FSDP on GPUs to here."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..collectives.random_state import at_rest
from ..consolidate.errors import (
    CheckpointNotFoundError,
    CoverageError,
    ForeignFileError,
    ModelMismatchError,
    UnreadableFileError,
    UnsafeFileError,
)
from ..wording import first_line
from .boxes import boxes
from .filling import fill_model, fill_optimizer
from .inventory import Inventory
from .matching import LoadedKeys, Match, listed, match_model
from .meeting import Meeting
from .optimizer_forms import into_words, saver_of
from .optimizer_matching import OptimizerMatch, match_optimizer
from .optimizer_names import named
from .optimizers import members_of_groups
from .parts import agreed_inventory
from .protocol import entries_of, offered_by_load, unread_state_dict
from .stored import Stored

# What people call things at the top of what they save; torch's tutorials put all under "app".
_MODEL = ("model.", "app.model.", "state_dict.", "module.", "")
_OPTIMIZER = ("optim.", "optimizer.", "app.optim.", "app.optimizer.", "optimizers.")


@at_rest()
def from_dcp(
    path: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    allow_pickle: bool = False,
    strict: bool = True,
) -> LoadedKeys:
    """Loads a directory that ``torch.distributed.checkpoint`` or :func:`to_dcp` wrote.

    Must be called on every rank, all seeing the directory. It may come from any number of GPUs and
    any parallelism, and have the model under ``"model"`` or without a name of its own, the
    optimizer under ``"optim"`` or ``"optimizer"``, both also inside ``"app"``. Every rank reads
    what overlaps its own shards; in memory is one chunk of the checkpoint at a time (a GPU's shard
    of a parameter). All is checked before anything is changed.

    The metadata of such a directory is a Python pickle, and reading it executes what its author
    wants. Hence ``allow_pickle``.

    Args:
        allow_pickle: you trust whoever could write to the directory.
        strict: names must be those of the model. ``False``: what fits is loaded.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``.

    Raises:
        UnsafeFileError: ``allow_pickle`` is not given.
        CheckpointNotFoundError: there is no such directory, or no metadata in it.
        UnreadableFileError, ForeignFileError, CoverageError: damaged, something else, or tensors
            with elements missing.
        ModelMismatchError: names, shapes, dtypes or parameter groups do not fit.
        OtherRankError: one of these on another rank.
    """
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)

    directories: list[_Directory] = []

    def opened() -> dict[str, Any]:
        if not allow_pickle:
            raise UnsafeFileError(
                f"{path}: its metadata is a pickle, and reading one executes what its author "
                "wants; pass allow_pickle=True if you trust it, or have it converted to "
                "safetensors where it was written, for load_weights. Nothing was read"
            )
        directories.append(_Directory(os.fspath(path)))
        return _model_in(directories[0], inventory, _keys(model, inventory))

    offered = offered_by_load(
        meeting, model, inventory, os.fspath(path), "open the checkpoint", opened
    )

    def match() -> tuple[Match, OptimizerMatch | None]:
        assert offered is not None  # every rank sees the directory
        directory = directories[0]
        reported = LoadedKeys(offered.missing, offered.unexpected)
        matched = match_model(inventory, offered.values, directory.path, strict, reported=reported)
        if optimizer is None:
            return matched, None
        label = f"{directory.path}: optim"
        groups = members_of_groups(inventory, optimizer)
        given = _optimizer_in(directory)
        saved = named(given, inventory, groups, label)
        saved = replace(saved, lists_all_groups=given["lists_all_groups"])
        saver = saver_of(optimizer)
        if saver is not None:
            state = into_words(saver, saved.state, inventory, label)
            saved = replace(saved, state=state, said=True)
        return matched, match_optimizer(inventory, optimizer, groups, saved, label)

    def fill() -> None:
        fill_model(inventory, matched)
        if state is not None:
            fill_optimizer(state)

    matched, state = meeting.each("match the checkpoint", match)
    meeting.together("load the checkpoint", fill)
    return matched.keys


def _keys(model: nn.Module, inventory: Inventory) -> list[str]:
    """Those of ``state_dict()`` of the unwrapped module; the model's names where that computes with
    values."""
    state = unread_state_dict(model, inventory)
    if state is not None:
        return list(state)
    return [name for entry in entries_of(inventory) for name in entry.names]


def _model_in(directory: _Directory, inventory: Inventory, names: Sequence[str]) -> dict[str, Any]:
    def fitting(prefix: str) -> int:
        return sum(prefix + name in directory.tensors for name in names)

    prefix = max(_MODEL, key=fitting)
    if names and not fitting(prefix):
        raise ModelMismatchError(
            f"{directory.path}: has no tensor of the model, such as 'model.{names[0]}'; it has "
            f"{listed(directory.tensors)}"
        )
    # Without a name of its own, the model's tensors are beside those of the optimizer.
    others = _OPTIMIZER if not prefix else ()

    def below(keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key.startswith(prefix) and not key.startswith(others)]

    tensors = {key: directory.tensors[key] for key in below(directory.tensors)}
    objects = set(below(directory.objects))
    extra: dict[str, Any] = {}
    for name in inventory.extra_state:
        own = [key for key in (*tensors, *objects) if f"{key}.".startswith(f"{prefix}{name}.")]
        if own:
            extra[name] = directory.nested(prefix + name, own)
            tensors = {key: stored for key, stored in tensors.items() if key not in own}
            objects -= set(own)
    if prefix:  # else they need not be the model's
        found = directory.objects_at(sorted(objects))
        extra |= {key[len(prefix) :]: value for key, value in found.items()}
    return {key[len(prefix) :]: stored for key, stored in tensors.items()} | extra


def _optimizer_in(directory: _Directory) -> dict[str, Any]:
    """The optimizer's state dict, by name or by number, whichever of torch's ways it was saved."""
    keys = [*directory.tensors, *directory.objects]
    prefix = next(
        (p for p in _OPTIMIZER if any(key.startswith(f"{p}param_groups") for key in keys)), None
    )
    if prefix is None:
        raise ModelMismatchError(
            f"{directory.path}: has no optimizer, looked for 'param_groups' under "
            f"{listed(p.rstrip('.') for p in _OPTIMIZER)}"
        )
    own = [key for key in keys if key.startswith(prefix)]
    small = directory.objects_at(key for key in own if key not in directory.tensors)
    for key in own:
        stored = directory.tensors.get(key)
        if stored is not None and stored.shape == ():
            small[key] = stored.read(0, 1)[0]
    state: dict[str | int, dict[str, Any]] = {}
    by_group: dict[str | int, dict[str, Any]] = {}
    for key in own:
        value = small.get(key, directory.tensors.get(key))
        kind, _, rest = key[len(prefix) :].partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "state" and name:
            state.setdefault(_number_or_name(name), {})[last] = value
        elif kind == "param_groups" and name:
            by_group.setdefault(_number_or_name(name), {})[last] = value
        elif kind == "param_groups" and not rest and isinstance(value, list):
            by_group.update(enumerate(value))  # torch before 2.4 saved them as one object
        else:
            raise ModelMismatchError(f"{directory.path}: {key!r} is no part of an optimizer")
    lists_all_groups = all(isinstance(key, int) for key in by_group)
    if lists_all_groups:
        groups = [by_group[key] for key in sorted(by_group)]
    else:  # flattened by torch: every parameter has the options of its group
        groups = [{**options, "params": [name]} for name, options in by_group.items()]
    return {"state": state, "param_groups": groups, "lists_all_groups": lists_all_groups}


def _number_or_name(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else text


class _Directory:
    """Every tensor in it as a :class:`Stored` one. Opening executes the pickle of its metadata.

    Raises:
        CheckpointNotFoundError, UnreadableFileError, ForeignFileError: there is none, or a damaged
            one, or something else.
    """

    def __init__(self, path: str):
        self.path = path
        if not os.path.isfile(os.path.join(path, ".metadata")):
            raise CheckpointNotFoundError(
                f"{path}: has no .metadata; no directory of torch.distributed.checkpoint, or one "
                "whose writing never ended"
            )
        self.reader = FileSystemReader(path)
        self.metadata = self._guarded("its .metadata", lambda: _read_metadata(path))
        if not isinstance(self.metadata, Metadata) or not isinstance(
            self.metadata.storage_data, Mapping
        ):
            raise ForeignFileError(f"{path}: its .metadata is not torch.distributed.checkpoint's")
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self.tensors: dict[str, Stored] = {}
        self.objects: list[str] = []
        for key, about in self.metadata.state_dict_metadata.items():
            if isinstance(about, BytesStorageMetadata):
                self.objects.append(key)
            else:
                self.tensors[key] = self._stored(key, about)

    def objects_at(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is no tensor, by key."""
        keys = list(keys)
        none = torch.Size((0,))
        items = [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(k), none, MetadataIndex(k), none, none)
            for k in keys
        ]
        found: dict[str, Any] = {}
        self._guarded(f"{len(keys)} objects", lambda: self._read(items, _Planner([], found)))
        return found

    def nested(self, top: str, keys: list[str]) -> Any:
        """What was saved as ``top``: torch takes dicts apart, and lists with dicts in them."""
        values = self.objects_at(key for key in keys if key not in self.tensors)
        for key in keys:
            if key in self.tensors:
                values[key] = self.tensors[key].whole()
        if top in values:
            return values[top]
        paths = self.metadata.planner_data or {}
        found: dict[Any, Any] = {}
        for key, value in values.items():
            path = _inside(top, key, tuple(paths.get(key, ())))
            inner = found
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = value
        return _with_lists(found)

    def _stored(self, key: str, about: TensorStorageMetadata) -> Stored:
        shape, dtype = tuple(about.size), about.properties.dtype

        def read(begin: int, end: int) -> torch.Tensor:
            whole = torch.empty(end - begin, dtype=dtype)
            targets = boxes(shape, begin, end)
            views = [whole[b.begin - begin : b.end - begin].view(b.sizes) for b in targets]
            wanted = [ChunkStorageMetadata(box.offsets, box.sizes) for box in targets]
            items = create_read_items_for_chunk_list(key, about, wanted)
            found = sum(item.lengths.numel() for item in items)
            if found != end - begin:
                raise CoverageError(
                    f"{self.path}: has {found} of the elements {begin} to {end} of {key!r}"
                )
            self._guarded(repr(key), lambda: self._read(items, _Planner(views, {})))
            return whole

        return Stored(shape, dtype, read)

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        self.reader.read_data(LoadPlan(items), planner).wait()

    def _guarded(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except MemoryError:
            raise
        except Exception as error:  # damaged input can fail anywhere in torch's reader
            raise UnreadableFileError(
                f"{self.path}: cannot read {what} (truncated, corrupt, or of another torch): "
                f"{type(error).__name__}: {first_line(error, 200)}"
            ) from error


class _Properties(TensorProperties):
    """Those of a later torch too, which come with more: 2.15 adds the strides that a tensor had
    when it was saved, and 2.9 refuses what is not five values."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "pathlib._local":  # where Python 3.13 has its paths
            module_name = "pathlib"
        found = super().find_class(module_name, global_name)
        return _Properties if found is TensorProperties else found


def _read_metadata(path: str) -> Any:
    with open(os.path.join(path, ".metadata"), "rb") as file:
        return _Unpickler(file).load()


def _inside(top: str, key: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The names in ``path``, which ``key`` was made of, that come after ``top``."""
    for start in range(len(path)):
        if ".".join(map(str, (top, *path[start:]))) == key:
            return path[start:]
    return tuple(key[len(top) + 1 :].split("."))


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_with_lists(value[key]) for key in sorted(value)]
    return {key: _with_lists(each) for key, each in value.items()}


class _Planner(DefaultLoadPlanner):
    """Tells torch's reader where to put what it reads: a tensor's boxes, or objects by key."""

    def __init__(self, targets: list[torch.Tensor], objects: dict[str, Any]):
        super().__init__()
        self.targets = targets
        self.objects = objects

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)
        self.objects[read_item.dest_index.fqn] = loaded

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None  # that of the box, as all of these are made
        target = self.targets[number]
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...
