"""``load_weights``: loads weight files into a sharded model, without the full model in memory."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..collectives.random_state import synced_device
from ..consolidate.errors import (
    CheckpointNotFoundError,
    ForeignFileError,
    InvalidMetadataError,
    ModelMismatchError,
    UnsafeFileError,
)
from ..consolidate.format.container import TensorEntry, read_container
from ..consolidate.format.dtypes import DTYPES, is_dense, tensor_bytes
from ..consolidate.format.folders import list_folders
from ..consolidate.format.local import LocalStore
from ..consolidate.format.manifest import FORMAT, NAME
from ..consolidate.format.store import Store, join, open_store, read
from ..consolidate.format.strict import read_json
from ..consolidate.legacy.source import read_file
from .inventory import agree_on_inventory
from .matching import LoadedKeys, Match, match_model
from .protocol import capture_loaded_values
from .rank_exchange import RankExchange
from .readable_tensor import ReadableTensor
from .value_loading import load_model_values

# In order of preference.
_IN_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pth",
)
_MOST_INDEX_BYTES = 1 << 28
_SAFETENSORS, _INDEX = ".safetensors", ".index.json"
_PLAIN_NAME = re.compile(r"[^/\\\0\ud800-\udfff]+")
# Training scripts save the weights under these keys.
_KEYS = ("model", "state_dict", "module")
_OF_SAVE = (
    "{}: is of a sharded checkpoint. Load it with load_checkpoint, or make one file of it with "
    "python -m xla_fsdp.consolidate."
)
_REMEDY = "if you trust it, load it with torch.load and pass the dict to load_full_state_dict"


@synced_device()
def load_weights(
    model: nn.Module,
    path: Any,
    *,
    strict: bool = True,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
    cast: bool = True,
) -> LoadedKeys:
    """Loads weight files of the unwrapped module. Call it on every rank; all must see the files.

    Memory: one shard of a parameter at a time. Extra state of modules is not loaded. All names,
    shapes and dtypes are checked before anything is changed. A read error after that leaves the
    model partly loaded.

    Args:
        path: one of:

            * a ``.safetensors`` file, local or a URL of fsspec;
            * a local torch file with a state dict, or with one under ``"model"``, ``"state_dict"``
              or ``"module"``, loaded with ``weights_only=True``;
            * an index of several files (``*.index.json``);
            * a folder with ``model.safetensors``, ``pytorch_model.bin``, the index of either,
              ``model.pth``, or one ``.safetensors`` file.
        strict: raise unless the names are those of the model; for a tied parameter, one of its
            names is enough. ``False`` loads those that match.
        prefix: load only names that begin with this text, and remove it (``"backbone."``).
        rename: a function from a name in the file (without ``prefix``) to the name in the model, or
            to ``None`` to skip the tensor.
        cast: cast floating-point weights to the dtype of the parameter. ``False``: a different
            dtype raises an error.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict`` returns them.

    Raises:
        CheckpointNotFoundError: there is no file at ``path``.
        UnreadableFileError, InvalidMetadataError: a file is damaged or contradicts itself.
        ForeignFileError: a file has no weights, or not those that the index lists.
        UnsafeFileError: a file would have to run code, or an index names a file elsewhere.
        ModelMismatchError: names, shapes or dtypes do not match the model.
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    label = str(path)

    def opened() -> dict[str, Any]:
        # Extra state is neither loaded nor reported as missing.
        tensors = _renamed(_open_weights(path), prefix, rename, path)
        return dict.fromkeys(inventory.extra_state) | tensors

    offered = capture_loaded_values(exchange, model, inventory, label, "open the weights", opened)
    own = replace(inventory, extra_state={})

    def match() -> Match:
        assert offered is not None
        values = {n: v for n, v in offered.values.items() if n not in inventory.extra_state}
        return match_model(own, values, label, strict, cast, reported=offered.keys)

    matched = exchange.run_on_each_rank("match the weights", match)
    exchange.run_and_gather("load the weights", lambda: load_model_values(inventory, matched))
    return matched.keys


def _renamed(
    tensors: dict[str, ReadableTensor],
    prefix: str,
    rename: Callable[[str], str | None] | None,
    path: Any,
) -> dict[str, ReadableTensor]:
    found: dict[str, ReadableTensor] = {}
    for name, stored in tensors.items():
        if not name.startswith(prefix):
            continue
        own = name[len(prefix) :]
        new = rename(own) if rename is not None else own
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(
                f"rename must return a str or None, got {type(new).__name__} for {own!r:.120}"
            )
        if new in found:
            raise ModelMismatchError(
                f"{path}: two tensors are named {new!r} after renaming. Change prefix or rename."
            )
        found[new] = stored
    if tensors and not found:
        raise ModelMismatchError(
            f"{path}: no name is left of {len(tensors)} with prefix={prefix!r}. The first name in "
            f"it is {next(iter(tensors))!r:.120}. Change prefix or rename."
        )
    return found


def _open_weights(path: Any) -> dict[str, ReadableTensor]:
    """The tensors at ``path`` by name. Raises ValueError for a torch file on an object store."""
    store, place = open_store(path)
    if store.is_folder(place):
        names = store.list(place)
        found = next((name for name in _IN_FOLDER if name in names), None)
        if found is None:
            several = [name for name in names if name.endswith(_SAFETENSORS)]
            if len(several) != 1:
                if NAME in names or list_folders(store, place):
                    raise ForeignFileError(_OF_SAVE.format(store.url(place)))
                raise CheckpointNotFoundError(
                    f"{store.url(place)}: has none of {', '.join(_IN_FOLDER)}"
                    + (f", but {len(several)} files *{_SAFETENSORS}" if several else "")
                    + ". Pass the path of the file."
                )
            found = several[0]
        place = join(place, found)
    return _open_index(store, place) if place.endswith(_INDEX) else _open_file(store, place)


def _open_file(store: Store, place: str) -> dict[str, ReadableTensor]:
    return (_open_safetensors if place.endswith(_SAFETENSORS) else _open_torch)(store, place)


def _open_index(store: Store, place: str) -> dict[str, ReadableTensor]:
    file = _resolved(store, place)
    size = store.size(file)
    if size > _MOST_INDEX_BYTES:
        raise InvalidMetadataError(
            f"{file}: has {size} bytes, an index has at most {_MOST_INDEX_BYTES}"
        )
    index = read_json(read(store, file, 0, size), place)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise InvalidMetadataError(
            f"{place}: has no weight_map, an object that maps names to files. Pass an index of "
            "weight files."
        )
    folder = posixpath.dirname(place)
    for file in set(where.values()):
        if not _PLAIN_NAME.fullmatch(file) or file in (".", "..") or file.endswith(_INDEX):
            raise UnsafeFileError(
                f"{place}: lists the file {file!r:.120}, but only plain names of files in the same "
                "folder are allowed"
            )
    files = {file: _open_file(store, join(folder, file)) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in files[file]:
            raise ForeignFileError(
                f"{join(folder, file)}: lacks {name!r:.120}, which {posixpath.basename(place)} "
                "lists in it. Copy all files of the same save."
            )
    for file, tensors in files.items():
        more = [name for name in tensors if where.get(name) != file]
        if more:
            raise ForeignFileError(
                f"{join(folder, file)}: has {more[0]!r:.120}, which {posixpath.basename(place)} "
                "does not list. Copy all files of the same save."
            )
    return {name: files[file][name] for name, file in where.items()}


def _open_safetensors(store: Store, place: str) -> dict[str, ReadableTensor]:
    place = _resolved(store, place)
    container = read_container(
        lambda begin, end: read(store, place, begin, end), store.size(place), place
    )
    if container.metadata.get("format") == FORMAT:
        raise ForeignFileError(_OF_SAVE.format(store.url(place)))

    def stored(entry: TensorEntry) -> ReadableTensor:
        def fill(out: torch.Tensor, begin: int) -> None:
            at = entry.begin + begin * entry.itemsize
            store.read_into(place, at, tensor_bytes(out))

        return ReadableTensor(entry.shape, DTYPES[entry.dtype], fill)

    return {name: stored(entry) for name, entry in container.entries.items()}


def _open_torch(store: Store, place: str) -> dict[str, ReadableTensor]:
    if not isinstance(store, LocalStore):
        store.size(place)  # raises if there is none
        raise ValueError(
            f"{store.url(place)}: torch files can be read from local paths only, because they are "
            "memory-mapped. Copy it to a local disk, or convert it to safetensors."
        )
    if not os.path.exists(place):
        raise CheckpointNotFoundError(f"{place}: does not exist. Pass a file or folder of weights.")
    content = read_file(place, remedy=_REMEDY)
    for key in _KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            if "shard_metadata" in content:
                raise ForeignFileError(
                    f"{place}: is the file of one rank of a sharded model. Consolidate the files "
                    "of all ranks first, with python -m xla_fsdp.consolidate."
                )
            content = content[key]
            break
    if not isinstance(content, Mapping):
        raise ForeignFileError(f"{place}: has a {type(content).__name__}, expected a state dict")
    content = {
        name: value
        for name, value in content.items()
        if not isinstance(name, str) or name.rpartition(".")[2] != "_extra_state"
    }
    tensors = {name: value for name, value in content.items() if is_dense(value)}
    strange = [name for name in content if name not in tensors]
    if strange or not all(isinstance(name, str) for name in tensors):
        raise ForeignFileError(
            f"{place}: {strange[0] if strange else 'a key'!r:.120} is not the name of a dense "
            f"tensor. Expected a state dict, or a dict with one under one of {', '.join(_KEYS)}."
        )
    return {name: ReadableTensor.from_tensor(tensor) for name, tensor in tensors.items()}


def _resolved(store: Store, place: str) -> str:
    """Resolves links of a local path: the cache of the Hugging Face hub consists of links."""
    return os.path.realpath(place) if isinstance(store, LocalStore) else place
