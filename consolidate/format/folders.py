"""Finds, names and removes checkpoints in a folder, one for each step::

    runs/vit/step-00001000/manifest.json, rank-00000-of-00008.safetensors, ...
    runs/vit/step-00002000.2/...                     step 2000 saved again
    runs/vit/.step-00003000.5f0c9d41a7b8e6f2.partial/   being saved, or a leftover

A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import posixpath
import re
import secrets
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import CheckpointNotFoundError, IncompleteCheckpointError, NotAFolderError
from . import manifest
from .store import Store, join, open_store

_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")
_PARTIAL = re.compile(r"\.(step-[0-9]{8,18}(?:\.[1-9][0-9]{0,8})?)\.[0-9a-f]{16}\.partial")
_RANK_FILE = re.compile(r"rank-[0-9]+-of-[0-9]+\.safetensors")


@dataclass(frozen=True, order=True)
class CheckpointFolder:
    """The folder of one save. ``version`` counts the saves of the same step, from 1."""

    step: int
    version: int = 1

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.version}" if self.version > 1 else "")

    def partial_name(self, save_id: str) -> str:
        return f".{self.name}.{save_id}.partial"


def list_folders(store: Store, root: str) -> list[CheckpointFolder]:
    """The checkpoint folders in ``root``, in order of step. Some may be incomplete."""
    return sorted(place for place in map(parse_folder_name, store.list(root)) if place is not None)


def parse_folder_name(name: str) -> CheckpointFolder | None:
    match = _STEP.fullmatch(name)
    place = match and CheckpointFolder(int(match[1]), int(match[2] or 1))
    return place if place and place.name == name else None  # not step-000000001, not step-X.1


def next_folder(store: Store, root: str, step: int) -> CheckpointFolder:
    """The folder for a new save of ``step``, after all complete or running saves of it."""
    begun = filter(None, map(_PARTIAL.fullmatch, store.list(root)))
    there = [
        *list_folders(store, root),
        *filter(None, (parse_folder_name(match[1]) for match in begun)),
    ]
    versions = [place.version for place in there if place.step == step]
    return CheckpointFolder(step, max(versions, default=0) + 1)


def has_manifest(store: Store, folder: str) -> bool:
    try:
        if manifest.NAME not in store.list(folder):
            return False
        return store.renames or manifest.is_ended(store, join(folder, manifest.NAME))
    except (CheckpointNotFoundError, NotAFolderError):  # it is a file, or was just removed
        return False


def find_newest(store: Store, root: str, step: int | None = None) -> CheckpointFolder | None:
    """The last complete save of ``step`` (``None``: of the highest step).

    Raises TypeError if ``step`` is neither a number nor ``None``.
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, Real)):
        raise TypeError(f"step must be an int or None, got {step!r:.80} ({type(step).__name__})")
    for place in reversed(list_folders(store, root)):
        if step in (None, place.step) and has_manifest(store, join(root, place.name)):
            return place
    return None


def resolve_checkpoint(path: Any, step: int | None = None) -> tuple[Store, str]:
    """The store and folder of the checkpoint at ``path``.

    If ``path`` has checkpoints, it is the newest, or the last save of ``step``. Raises
    CheckpointNotFoundError, IncompleteCheckpointError.
    """
    store, folder = open_store(path)
    names, shown = store.list(folder), store.url(folder)
    if step is not None:
        place = find_newest(store, folder, step)
        if place is None and manifest.NAME in names:
            raise CheckpointNotFoundError(
                f"{shown}: is one checkpoint, not a folder of several. Pass the folder above it, "
                "or no step."
            )
        if place is None:
            raise CheckpointNotFoundError(
                f"{shown}: has no complete checkpoint of step {step}. Pass a step that it has, or "
                "None for the newest."
            )
        return store, join(folder, place.name)
    if manifest.NAME in names:
        return store, folder
    place = find_newest(store, folder)
    if place is not None:
        return store, join(folder, place.name)
    if not store.is_folder(folder):
        raise CheckpointNotFoundError(f"{shown}: does not exist. Pass a checkpoint folder.")
    raise IncompleteCheckpointError(
        f"{shown}: has no {manifest.NAME}, and no folder step-... that has one. It is not a "
        "checkpoint, or its save did not finish. Use another checkpoint."
    )


def find_leftovers(store: Store, root: str) -> list[str]:
    """Paths in ``root`` that interrupted saves have left. Running saves are not included."""
    partial = [
        name
        for name in store.list(root)
        if _PARTIAL.fullmatch(name) and not store.is_locked(join(root, name))
    ]
    if not store.renames:
        partial += [
            place.name
            for place in list_folders(store, root)
            if _is_interrupted(store, join(root, place.name))
        ]
    return [join(root, name) for name in partial]


def _is_interrupted(store: Store, folder: str) -> bool:
    """Whether a save or removal of ``folder`` was interrupted: it has rank files only."""
    names = [name for name in store.list(folder) if name != manifest.NAME]
    return not has_manifest(store, folder) and all(map(_RANK_FILE.fullmatch, names))


def find_superseded(
    store: Store, root: str, saved: CheckpointFolder, keep_last: int | None
) -> list[str]:
    """Paths of the checkpoints to remove after the save of ``saved``, oldest first.

    These are earlier saves of the same steps, and all but the ``keep_last`` newest steps. Later
    steps than that of ``saved`` belong to another run and are not removed.
    """
    complete = [
        place
        for place in list_folders(store, root)
        if place.step <= saved.step and has_manifest(store, join(root, place.name))
    ]
    newest_of = {place.step: place for place in complete}
    kept = sorted(newest_of)[-keep_last:] if keep_last is not None else list(newest_of)
    wanted = {saved, *(newest_of[step] for step in kept)}
    return [join(root, place.name) for place in complete if place not in wanted]


def remove_checkpoint(store: Store, folder: str) -> None:
    """Removes a checkpoint. If this is interrupted, the next save removes the rest."""
    if store.renames:
        # This removes only the link if the folder is a symbolic link.
        root, name = posixpath.split(folder)
        gone = join(root, f".{name}.{secrets.token_hex(8)}.partial")
        store.rename(folder, gone)
        store.remove(gone)
    else:
        store.remove(join(folder, manifest.NAME))
        store.remove(folder)
