"""``from_dcp``: loads a directory of ``torch.distributed.checkpoint``, for example from GPUs."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
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

from ..collectives.random_state import synced_device
from ..consolidate.errors import (
    CheckpointNotFoundError,
    CoverageError,
    ForeignFileError,
    ModelMismatchError,
    UnreadableFileError,
    UnsafeFileError,
)
from ..consolidate.format.store import path_text
from ..wording import first_line
from .inventory import Inventory, agree_on_inventory
from .matching import (
    LoadedKeys,
    Match,
    OptimizerMatch,
    convert_numbers_to_names,
    format_names,
    match_model,
    match_optimizer,
)
from .optimizer_state import members_of_groups
from .protocol import capture_loaded_values, placeholder_state_dict
from .rank_exchange import RankExchange
from .readable_tensor import ReadableTensor
from .value_loading import load_model_values, load_optimizer_values


class IndexRange(NamedTuple):
    """A block of consecutive elements of the flattened tensor, the first at ``begin``."""

    offsets: torch.Size
    sizes: torch.Size
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.sizes.numel()


def split_index_range(shape: tuple[int, ...], begin: int, end: int) -> list[IndexRange]:
    """Splits a range of a flattened tensor into at most ``2 * n - 1`` blocks, in order."""
    if not shape:
        return [IndexRange(torch.Size(), torch.Size(), 0)] if begin < end else []
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[IndexRange] = []
    while begin < end:
        # The outermost dimension in which a complete entry begins here and fits.
        dim = next(i for i, n in enumerate(strides) if begin % n == 0 and begin + n <= end)
        offsets = [begin // n % size for n, size in zip(strides, shape, strict=True)]
        count = min((end - begin) // strides[dim], shape[dim] - offsets[dim])
        sizes = torch.Size((*[1] * dim, count, *shape[dim + 1 :]))
        found.append(IndexRange(torch.Size(offsets), sizes, begin))
        begin = found[-1].end
    return found


# Usual names in the saved dict. torch's tutorials add "app" on top.
_MODEL = ("model.", "app.model.", "state_dict.", "module.", "")
_OPTIMIZER = ("optim.", "optimizer.", "app.optim.", "app.optimizer.", "optimizers.")


@synced_device()
def from_dcp(
    path: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    allow_pickle: bool = False,
    strict: bool = True,
) -> LoadedKeys:
    """Loads a directory that ``torch.distributed.checkpoint`` or :func:`to_dcp` wrote.

    Call it on every rank; all must see the directory. Any number of GPUs with any parallelism may
    have written it. The model may be at the top level or under ``"model"``, the optimizer under
    ``"optim"`` or ``"optimizer"``, both also inside ``"app"``. Host memory: one chunk (a GPU's
    shard of a parameter) at a time. Everything is checked before anything is changed.

    Args:
        allow_pickle: must be ``True``. The metadata is a pickle: reading it runs code of everyone
            who could write to the directory.
        strict: raise unless the names are those of the model. ``False`` loads those that match.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict`` returns them.

    Raises:
        UnsafeFileError: ``allow_pickle`` is not ``True``.
        CheckpointNotFoundError: the directory does not exist or has no metadata.
        UnreadableFileError, ForeignFileError, CoverageError: the directory is damaged, has another
            format, or lacks elements of a tensor.
        ModelMismatchError: names, shapes, dtypes or parameter groups do not match.
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)

    def open_directory() -> _Directory:
        if not allow_pickle:
            raise UnsafeFileError(
                f"{path}: its metadata is a pickle, and reading a pickle runs code that its author "
                "chose. Nothing was read. Pass allow_pickle=True if you trust the author, or "
                "convert it to safetensors where it was written and use load_weights."
            )
        return _Directory(path_text(path))

    directory = exchange.run_on_each_rank("open the checkpoint", open_directory)
    offered = capture_loaded_values(
        exchange,
        model,
        inventory,
        directory.path,
        "read the checkpoint",
        lambda: _model_in(directory, model, inventory),
    )

    def match() -> tuple[Match, OptimizerMatch | None]:
        assert offered is not None
        matched = match_model(
            inventory, offered.values, directory.path, strict, reported=offered.keys
        )
        if optimizer is None:
            return matched, None
        label = f"{directory.path}: optim"
        groups = members_of_groups(inventory, optimizer)
        given = _optimizer_in(directory)
        saved = convert_numbers_to_names(given, inventory, optimizer, label)
        saved = replace(saved, lists_all_groups=given["lists_all_groups"])
        return matched, match_optimizer(inventory, optimizer, groups, saved, label)

    def fill() -> None:
        load_model_values(inventory, matched)
        if state is not None:
            load_optimizer_values(state)

    matched, state = exchange.run_on_each_rank("match the checkpoint", match)
    exchange.run_and_gather("load the checkpoint", fill)
    return matched.keys


def _model_in(directory: _Directory, model: nn.Module, inventory: Inventory) -> dict[str, Any]:
    names = list(placeholder_state_dict(model, inventory) or ())
    if not names:  # state_dict() computes with values
        names = [name for entry in inventory.entries() for name in entry.names]

    def fitting(prefix: str) -> int:
        return sum(prefix + name in directory.tensors for name in names)

    prefix = max(_MODEL, key=fitting)
    if names and not fitting(prefix):
        raise ModelMismatchError(
            f"{directory.path}: has no tensor of the model, such as 'model.{names[0]}'. It has "
            f"{format_names(directory.tensors)}. Pass the directory of this model."
        )
    # Without a prefix, the optimizer is at the same level.
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
    if prefix:  # else they may not belong to the model
        found = directory.objects_at(sorted(objects))
        extra |= {key[len(prefix) :]: value for key, value in found.items()}
    return {key[len(prefix) :]: stored for key, stored in tensors.items()} | extra


def _optimizer_in(directory: _Directory) -> dict[str, Any]:
    """The optimizer's state dict, by name or number, from any layout that torch writes.

    ``"lists_all_groups"`` is ``False`` if groups without parameters are not recorded.
    """
    keys = [*directory.tensors, *directory.objects]
    prefix = next(
        (p for p in _OPTIMIZER if any(key.startswith(f"{p}param_groups") for key in keys)), None
    )
    if prefix is None:
        raise ModelMismatchError(
            f"{directory.path}: has no optimizer ('param_groups' under one of "
            f"{format_names(p.rstrip('.') for p in _OPTIMIZER)}). Load the model alone."
        )
    own = [key for key in keys if key.startswith(prefix)]
    small = directory.objects_at(key for key in own if key not in directory.tensors)
    for key in own:
        stored = directory.tensors.get(key)
        if stored is not None and stored.shape == ():
            small[key] = stored.read(0, 1)[0]
    state: dict[Any, dict[str, Any]] = {}
    by_group: dict[str, dict[str, Any]] = {}
    for key in own:
        value = small.get(key, directory.tensors.get(key))
        kind, _, rest = key[len(prefix) :].partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "state" and name:
            state.setdefault(name, {})[last] = value
        elif kind == "param_groups" and name:
            by_group.setdefault(name, {})[last] = value
        elif kind == "param_groups" and not rest and isinstance(value, list):
            # torch before 2.4 saved them as one object
            by_group.update((str(number), group) for number, group in enumerate(value))
        else:
            raise ModelMismatchError(
                f"{directory.path}: {key!r} is not a key of an optimizer's state dict. Load the "
                "model alone."
            )
    # A parameter may be named "0", as a group is: only groups list parameters.
    lists_all_groups = all("params" in group for group in by_group.values())
    if lists_all_groups:
        groups = [by_group[key] for key in sorted(by_group, key=int)]
        if any(isinstance(one, int) for group in groups for one in group["params"]):
            state = {int(name): own for name, own in state.items()}
    else:  # torch flattened it
        groups = [{**options, "params": [name]} for name, options in by_group.items()]
    return {"state": state, "param_groups": groups, "lists_all_groups": lists_all_groups}


class _Directory:
    """A directory with its tensors. Opening it loads a pickle."""

    def __init__(self, path: str):
        self.path = path
        if not os.path.isfile(os.path.join(path, ".metadata")):
            raise CheckpointNotFoundError(
                f"{path}: has no .metadata. It is not a directory of torch.distributed.checkpoint, "
                "or its save did not finish. Pass a complete one."
            )
        self.reader = FileSystemReader(path)
        with (
            _as_unreadable(path, "its .metadata"),
            open(os.path.join(path, ".metadata"), "rb") as file,
        ):
            self.metadata = _Unpickler(file).load()
        if not isinstance(self.metadata, Metadata) or not isinstance(
            self.metadata.storage_data, Mapping
        ):
            raise ForeignFileError(
                f"{path}: its .metadata is not torch.distributed.checkpoint's. Pass a directory "
                "that dcp.save or to_dcp wrote."
            )
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self.tensors: dict[str, ReadableTensor] = {}
        self.objects: list[str] = []
        for key, about in self.metadata.state_dict_metadata.items():
            if isinstance(about, BytesStorageMetadata):
                self.objects.append(key)
            else:
                self.tensors[key] = self._stored(key, about)

    def objects_at(self, keys: Iterable[str]) -> dict[str, Any]:
        keys = list(keys)
        none = torch.Size((0,))
        items = [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(k), none, MetadataIndex(k), none, none)
            for k in keys
        ]
        found: dict[str, Any] = {}
        _read_items(self.reader, f"{len(keys)} objects", items, _Planner([], found))
        return found

    def nested(self, top: str, keys: list[str]) -> Any:
        """Rebuilds the value saved as ``top``, which torch has split into leaves."""
        values = self.objects_at(key for key in keys if key not in self.tensors)
        for key in keys:
            if key in self.tensors:
                values[key] = self.tensors[key].read_full()
        if top in values:
            return values[top]
        paths = self.metadata.planner_data or {}
        below = {key: (top, *_path_below(top, key, tuple(paths.get(key, ())))) for key in values}
        return unflatten_state_dict(values, below)[top]

    def _stored(self, key: str, about: TensorStorageMetadata) -> ReadableTensor:
        shape, dtype = tuple(about.size), about.properties.dtype

        reader = self.reader  # not self, which refers to the result

        def fill(out: torch.Tensor, begin: int) -> None:
            end = begin + out.numel()
            targets = split_index_range(shape, begin, end)
            views = [out[b.begin - begin : b.end - begin].view(b.sizes) for b in targets]
            wanted = [ChunkStorageMetadata(box.offsets, box.sizes) for box in targets]
            items = create_read_items_for_chunk_list(key, about, wanted)
            found = sum(item.lengths.numel() for item in items)
            if found != end - begin:
                raise CoverageError(
                    f"{reader.path}: has only {found} of the elements {begin} to {end} of {key!r}. "
                    "Use another checkpoint."
                )
            _read_items(reader, repr(key), items, _Planner(views, {}))

        return ReadableTensor(shape, dtype, fill)


def _read_items(
    reader: FileSystemReader, what: str, items: list[ReadItem], planner: LoadPlanner
) -> None:
    with _as_unreadable(str(reader.path), what):
        reader.read_data(LoadPlan(items), planner).wait()


@contextlib.contextmanager
def _as_unreadable(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # damaged input can raise any
        raise UnreadableFileError(
            f"{path}: cannot read {what}: it is truncated, corrupt, or from an incompatible torch "
            f"version ({type(error).__name__}: {first_line(error, 200)})"
        ) from error


class _Properties(TensorProperties):
    """torch 2.15 also writes the strides of a tensor, for which torch 2.9 raises."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "pathlib._local":  # in Python 3.13
            module_name = "pathlib"
        found = super().find_class(module_name, global_name)
        return _Properties if found is TensorProperties else found


def _path_below(top: str, key: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The part of ``path`` (the names in ``key``) after ``top``."""
    for start in range(len(path)):
        if ".".join(map(str, (top, *path[start:]))) == key:
            return path[start:]
    return tuple(key[len(top) + 1 :].split("."))


class _Planner(DefaultLoadPlanner):
    def __init__(self, targets: list[torch.Tensor], objects: dict[str, Any]):
        super().__init__()
        self.targets = targets
        self.objects = objects

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)
        self.objects[read_item.dest_index.fqn] = loaded

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        target = self.targets[number]
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...
