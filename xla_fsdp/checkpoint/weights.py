"""Plain weights from files into a sharded model, which is never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..collectives.random_state import at_rest
from ..consolidate.errors import ModelMismatchError
from .filling import fill_model
from .matching import LoadedKeys, Match, match_model
from .meeting import Meeting
from .parts import agreed_inventory
from .protocol import offered_by_load
from .stored import Stored
from .weight_files import open_weights


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
        tensors = _renamed(open_weights(path), prefix, rename, path)
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
