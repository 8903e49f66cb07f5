"""Checkpoints side by side in one folder, one for each step.

::

    runs/vit/step-00001000/manifest.json, rank-00000-of-00008.safetensors, ...
    runs/vit/step-00002000/...
    runs/vit/step-00002000.2/...                     step 2000 saved again
    runs/vit/.step-00003000.5f0c9d41a7b8e6f2.partial/   being saved, or a leftover

A folder without a manifest is no checkpoint. Where folders can be renamed (``Store.renames``) the
partial one becomes the final one in one step; elsewhere files are written to their final place,
the manifest last.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointNotFoundError, IncompleteCheckpointError
from . import manifest
from .store import Store, join, open_store

_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")
_PARTIAL = re.compile(r"\.(step-[0-9]{8,18}(?:\.[1-9][0-9]{0,8})?)\.[0-9a-f]{16}\.partial")
_RANK_FILE = re.compile(r"rank-[0-9]+-of-[0-9]+\.safetensors")


@dataclass(frozen=True, order=True)
class Place:
    """The folder of one save; ``version`` counts saves of the same step, from 1."""

    step: int
    version: int = 1

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.version}" if self.version > 1 else "")

    def partial_name(self, save_id: str) -> str:
        """What it is called while it is being written."""
        return f".{self.name}.{save_id}.partial"


def places(store: Store, root: str) -> list[Place]:
    """The checkpoints in a folder by their names, oldest first; not yet known to be whole."""
    return sorted(place for place in map(place_of, store.list(root)) if place is not None)


def place_of(name: str) -> Place | None:
    """The place that has this name, ``None`` if none has."""
    match = _STEP.fullmatch(name)
    place = match and Place(int(match[1]), int(match[2] or 1))
    return place if place and place.name == name else None  # not step-000000001, not step-X.1


def next_place(store: Store, root: str, step: int) -> Place:
    """Where to save ``step``: beside what is there of it already, or is being saved."""
    begun = filter(None, map(_PARTIAL.fullmatch, store.list(root)))
    there = [*places(store, root), *filter(None, (place_of(match[1]) for match in begun))]
    versions = [place.version for place in there if place.step == step]
    return Place(step, max(versions, default=0) + 1)


def has_manifest(store: Store, folder: str) -> bool:
    """Whether ``folder`` claims to be a checkpoint."""
    try:
        if manifest.NAME not in store.list(folder):
            return False
        return store.renames or manifest.is_ended(store, join(folder, manifest.NAME))
    except CheckpointNotFoundError:  # a file of that name, or removed a moment ago
        return False


def newest(store: Store, root: str, step: int | None = None) -> Place | None:
    """The checkpoint of ``step``, or of the highest; of several of one step the last."""
    for place in reversed(places(store, root)):
        if step in (None, place.step) and has_manifest(store, join(root, place.name)):
            return place
    return None


def resolve(path: Any, step: int | None = None) -> tuple[Store, str]:
    """The store and folder of the checkpoint that ``path`` means: it, or the newest in it.

    With ``step``, the last that was saved of that step in the folder ``path``.

    Raises:
        CheckpointNotFoundError: there is nothing, or nothing of this step.
        IncompleteCheckpointError: there is no manifest.
    """
    store, folder = open_store(path)
    names = store.list(folder)
    if step is not None:
        place = newest(store, folder, step)
        if place is None:
            raise CheckpointNotFoundError(f"{folder}: has no complete checkpoint of step {step}")
        return store, join(folder, place.name)
    if manifest.NAME in names:
        return store, folder
    place = newest(store, folder)
    if place is not None:
        return store, join(folder, place.name)
    if not store.is_folder(folder):
        raise CheckpointNotFoundError(f"{folder}: is no folder")
    raise IncompleteCheckpointError(
        f"{folder}: has no {manifest.NAME}, nor a folder step-... that has one: no checkpoint, or "
        "one whose saving never ended"
    )


def leftovers(store: Store, root: str) -> list[str]:
    """Paths of what saves that were cut short have left in ``root``; not of those under way."""
    partial = [
        name
        for name in store.list(root)
        if _PARTIAL.fullmatch(name) and not store.is_held(join(root, name))
    ]
    if not store.renames:
        partial += [
            place.name
            for place in places(store, root)
            if _is_cut_short(store, join(root, place.name))
        ]
    return [join(root, name) for name in partial]


def _is_cut_short(store: Store, folder: str) -> bool:
    """Whether a save or a removal that never ended left ``folder``: it holds files of ours only."""
    names = [name for name in store.list(folder) if name != manifest.NAME]
    return not has_manifest(store, folder) and all(map(_RANK_FILE.fullmatch, names))


def superseded(store: Store, root: str, saved: Place, keep_last: int | None) -> list[str]:
    """Paths of checkpoints to remove after ``saved`` was, oldest first: the same step saved before,
    and all but the ``keep_last`` newest steps up to it. Later steps are of another run."""
    whole = [
        place
        for place in places(store, root)
        if place.step <= saved.step and has_manifest(store, join(root, place.name))
    ]
    newest_of = {place.step: place for place in whole}
    kept = sorted(newest_of)[-keep_last:] if keep_last is not None else list(newest_of)
    wanted = {saved, *(newest_of[step] for step in kept)}
    return [join(root, place.name) for place in whole if place not in wanted]


def discard(store: Store, folder: str) -> None:
    """Removes a checkpoint; one that is half removed is none, and is removed by the next save."""
    if store.renames:
        # Of a link to a folder only the link.
        root, _, name = folder.rpartition("/")
        gone = join(
            root or ("/" if folder.startswith("/") else ""),
            f".{name}.{secrets.token_hex(8)}.partial",
        )
        store.rename(folder, gone)
        store.remove(gone)
    else:
        store.remove(join(folder, manifest.NAME))
        store.remove(folder)
