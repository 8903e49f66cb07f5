"""Plain weights from files into a sharded model, which is never whole in memory."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..collectives.random_state import at_rest
from ..consolidate.errors import (
    CheckpointNotFoundError,
    ForeignFileError,
    InvalidMetadataError,
    ModelMismatchError,
    UnsafeFileError,
)
from ..consolidate.format.container import Entry, read_container
from ..consolidate.format.dtypes import DTYPES
from ..consolidate.format.local import LocalStore
from ..consolidate.format.store import Store, join, open_store, read
from ..consolidate.format.strict import read_json
from ..consolidate.legacy.files import read_file
from .filling import fill_model
from .matching import LoadedKeys, Match, match_model
from .meeting import Meeting
from .parts import agreed_inventory
from .protocol import offered_by_load
from .stored import Stored, is_dense

# What a folder is looked through for, the best first.
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
# Under which scripts save the weights beside other things.
_KEYS = ("model", "state_dict", "module")
_REMEDY = "load it yourself, if you trust it, and give the dict to load_full_state_dict"


@at_rest()
def load_weights(
    model: nn.Module,
    path: Any,
    *,
    strict: bool = True,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
    cast: bool = True,
) -> LoadedKeys:
    """Loads weights of the unwrapped module; must be called on every rank, all seeing the files.

    Every rank reads the bytes of its own part of each parameter from safetensors files; torch's
    are mapped and read likewise (those from before torch 1.6 are read whole). In memory is one
    shard of a parameter at a time. Extra state of modules is left alone. All names, shapes and
    dtypes are checked first; an error while reading, later, leaves the model partly loaded.

    Args:
        path: a ``.safetensors`` file, local or a URL of fsspec; a torch file with a state dict, or
            with one under ``"model"`` or ``"state_dict"``, loaded with ``weights_only=True``; an
            index of several (``*.index.json``); or a folder with ``model.safetensors``,
            ``model.safetensors.index.json``, ``pytorch_model.bin`` or its index.
        strict: names must be those of the model, though one of the names of a tied parameter is
            enough. ``False``: what fits is loaded.
        prefix: what names in the file begin with, to be taken off; others are left alone
            (``"backbone."``).
        rename: gives the model's name for one of the file (without ``prefix``), or ``None`` to
            leave it out.
        cast: floating-point weights may have another floating-point dtype than the parameter, and
            are cast to it.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``.
        UnreadableFileError, InvalidMetadataError, ForeignFileError, UnsafeFileError: a file is
            damaged, contradicts itself, holds no weights, or is not safe to read.
        ModelMismatchError: names, shapes or dtypes do not fit the model.
        OtherRankError: one of these on another rank.
    """
    meeting = Meeting()
    inventory = agreed_inventory(meeting, model)

    label = str(path)

    def opened() -> dict[str, Any]:
        # Of extra state nothing is loaded, and nothing reported.
        tensors = _renamed(_open_weights(path), prefix, rename, path)
        return dict.fromkeys(inventory.extra_state) | tensors

    offered = offered_by_load(meeting, model, inventory, label, "open the weights", opened)
    own = replace(inventory, extra_state={})

    def match() -> Match:
        assert offered is not None  # every rank has the file
        values = {n: v for n, v in offered.values.items() if n not in inventory.extra_state}
        reported = LoadedKeys(offered.missing, offered.unexpected)
        return match_model(own, values, label, strict, cast, reported=reported)

    matched = meeting.each("match the weights", match)
    meeting.together("load the weights", lambda: fill_model(inventory, matched))
    return matched.keys


def _renamed(
    tensors: dict[str, Stored], prefix: str, rename: Callable[[str], str | None] | None, path: Any
) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if not name.startswith(prefix):
            continue
        own = name[len(prefix) :]
        new = rename(own) if rename is not None else own
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename must return names or None, got {type(new).__name__}")
        if new in found:
            raise ModelMismatchError(f"{path}: two tensors are {new!r} after renaming")
        found[new] = stored
    if tensors and not found:
        raise ModelMismatchError(
            f"{path}: no name is left of {len(tensors)} with prefix={prefix!r}; the first in it is "
            f"{next(iter(tensors))!r:.120}"
        )
    return found


def _open_weights(path: Any) -> dict[str, Stored]:
    """The tensors at ``path`` by name: a file, an index of several, or a folder with either.

    ``*.safetensors`` are read in parts; other files are torch's, mapped where they can be.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ForeignFileError, InvalidMetadataError, UnreadableFileError: not what they claim to be.
        UnsafeFileError: a torch file needs objects outside torch's safe set, or an index names a
            file outside its folder.
        ValueError: a torch file on an object store.
    """
    store, place = open_store(path)
    if store.is_folder(place):
        names = store.list(place)
        found = next((name for name in _IN_FOLDER if name in names), None)
        if found is None:
            several = [name for name in names if name.endswith(_SAFETENSORS)]
            if len(several) != 1:
                raise CheckpointNotFoundError(
                    f"{place}: has none of {', '.join(_IN_FOLDER)}"
                    + (f", but {len(several)} files *{_SAFETENSORS}" if several else "")
                )
            found = several[0]
        place = join(place, found)
    if place.endswith(_INDEX):
        return _open_index(store, place)
    return _open_file(store, place)


def _open_file(store: Store, place: str) -> dict[str, Stored]:
    if place.endswith(_SAFETENSORS):
        return _open_safetensors(store, place)
    return _open_torch(store, place)


def _open_index(store: Store, place: str) -> dict[str, Stored]:
    index = read_json(read(store, *_whole(store, place, _MOST_INDEX_BYTES)), place)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise InvalidMetadataError(f"{place}: has no weight_map of names to files")
    folder = posixpath.dirname(place)
    for file in set(where.values()):
        if not _PLAIN_NAME.fullmatch(file) or file in (".", "..") or file.endswith(_INDEX):
            raise UnsafeFileError(
                f"{place}: names the file {file!r:.120}; only plain names of files in its own "
                "folder are allowed"
            )
    files = {file: _open_file(store, join(folder, file)) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in files[file]:
            raise ForeignFileError(
                f"{join(folder, file)}: lacks {name!r:.120}, which "
                f"{posixpath.basename(place)} says it has"
            )
    for file, tensors in files.items():
        more = [name for name in tensors if where.get(name) != file]
        if more:
            raise ForeignFileError(
                f"{join(folder, file)}: has {more[0]!r:.120}, of which "
                f"{posixpath.basename(place)} does not know"
            )
    return {name: files[file][name] for name, file in where.items()}


def _open_safetensors(store: Store, place: str) -> dict[str, Stored]:
    place = _resolved(store, place)
    container = read_container(
        lambda begin, end: read(store, place, begin, end), store.size(place), place
    )

    def stored(entry: Entry) -> Stored:
        dtype = DTYPES[entry.dtype]

        def part(begin: int, end: int) -> torch.Tensor:
            data = torch.empty((end - begin) * entry.itemsize, dtype=torch.uint8)
            at = entry.begin + begin * entry.itemsize
            if data.numel():
                store.read_into(place, at, data.numpy().data)
            return data.view(dtype)

        return Stored(entry.shape, dtype, part)

    return {name: stored(entry) for name, entry in container.entries.items()}


def _open_torch(store: Store, place: str) -> dict[str, Stored]:
    if not isinstance(store, LocalStore):
        raise ValueError(
            f"{place}: torch files can be read from local paths only, as they are mapped; copy it, "
            "or convert it to safetensors"
        )
    if not os.path.exists(place):
        raise CheckpointNotFoundError(f"{place}: does not exist")
    content = read_file(place, remedy=_REMEDY)
    for key in _KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            if "shard_metadata" in content:
                raise ForeignFileError(
                    f"{place}: is the file of one rank of a sharded model; consolidate all ranks' "
                    "first, with python -m xla_fsdp.consolidate"
                )
            content = content[key]
            break
    if not isinstance(content, Mapping):
        raise ForeignFileError(f"{place}: holds a {type(content).__name__}, expected a state dict")
    content = {name: value for name, value in content.items() if not _is_extra(name)}
    tensors = {name: value for name, value in content.items() if is_dense(value)}
    strange = [name for name in content if name not in tensors]
    if strange or not all(isinstance(name, str) for name in tensors):
        raise ForeignFileError(
            f"{place}: {strange[0] if strange else 'a key'!r:.120} is no dense tensor; expected a "
            f"state dict, or a dict with one under one of {', '.join(_KEYS)}"
        )
    return {name: Stored.of(tensor) for name, tensor in tensors.items()}


def _is_extra(name: Any) -> bool:
    # Extra state of modules is no weight, though it may be a tensor.
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def _resolved(store: Store, place: str) -> str:
    """Where a local file is: folders of the hub's cache are made of links."""
    return os.path.realpath(place) if isinstance(store, LocalStore) else place


def _whole(store: Store, place: str, most: int) -> tuple[str, int, int]:
    place = _resolved(store, place)
    size = store.size(place)
    if size > most:
        raise InvalidMetadataError(f"{place}: has {size} bytes, more than any index")
    return place, 0, size
