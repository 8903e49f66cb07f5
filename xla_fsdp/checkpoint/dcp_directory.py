"""One directory of ``torch.distributed.checkpoint``, opened."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
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

from ..consolidate.errors import (
    CheckpointNotFoundError,
    CoverageError,
    ForeignFileError,
    UnreadableFileError,
)
from ..wording import first_line
from .boxes import boxes
from .stored import Stored


class Directory:
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
