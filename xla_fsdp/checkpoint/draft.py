"""One save, from its folder to its manifest; what all ways of saving share.

Every rank writes one file into a folder that is no checkpoint yet; once all are durable, rank 0
writes the manifest and gives the folder its name. Whatever happens before leaves earlier
checkpoints as they are, and a folder that the next save removes.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ..collectives.random_state import DeviceRandomState
from ..consolidate.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ModelMismatchError,
    SharedStorageError,
    UnsupportedValueError,
)
from ..consolidate.format import folders, manifest
from ..consolidate.format.rank_file import FileRecord, write_file
from ..consolidate.format.store import Store, join, open_store, write
from .contents import Contents, take_contents
from .meeting import Meeting

# How long a file system may take to show one host what another has written.
_VISIBLE_SECONDS = 30.0
_BEGUN = "begun"
# Requests that rank 0 has under way at a time.
AT_ONCE = 32


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    path: str
    step: int
    keep_last: int | None

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise TypeError(f"step must be an int, got {type(self.step).__name__}")
        if not 0 <= self.step < 10**18:
            raise ValueError(f"step must be at least 0, got {self.step}")
        kept = self.keep_last
        if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or kept < 1):
            raise ValueError(f"keep_last must be an int of at least 1, or None, got {kept!r}")


@dataclass(frozen=True)
class Draft:
    """A save under way.

    Attributes:
        folder: the name it will have.
        partial: where the save keeps what is not part of the checkpoint; with a store that
            renames, also the checkpoint itself until it is complete.
        shown: ``folder`` as the user would write it.
        held: on rank 0 what tells other saves, while it exists, that this one is under way.
    """

    store: Store
    root: str
    place: folders.Place
    folder: str
    partial: str
    shown: str
    contents: Contents
    rank: int
    keep_last: int | None
    held: Sequence[object] = ()

    @property
    def data(self) -> str:
        """Where the ranks' files go."""
        return self.partial if self.store.renames else self.folder

    def file(self, rank: int) -> str:
        return join(self.data, manifest.file_name(rank, self.contents.manifest.world_size))

    def write(self) -> FileRecord:
        """Writes this rank's file; durable when it returns."""
        record = write_file(
            self.store, self.file(self.rank), self.contents.items, self.contents.metadata(self.rank)
        )
        self.store.sync_folder(self.data)
        return record

    def commit(self, records: Sequence[FileRecord]) -> str:
        """On rank 0, after all have written: makes it a checkpoint. Returns its path.

        What it supersedes is there until :meth:`tidy`.
        """
        # One answer of an object store takes long, and there are thousands to wait for.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._await_file, range(len(records)), records))
        whole = replace(self.contents.manifest, files=tuple(records))
        write(self.store, join(self.data, manifest.NAME), manifest.dump_manifest(whole))
        self.store.sync_folder(self.data)
        if self.store.renames:
            self.store.rename(self.partial, self.folder)
        return self.shown

    def give_up(self, meeting: Meeting) -> None:
        """After a failure that all ranks know of: returns when :meth:`abandon` is over."""
        if self.rank == 0:
            self.abandon()
        meeting.gather("give up the save", None)

    def abandon(self) -> None:
        """On rank 0, when no rank writes any more: removes what is there of it, if possible."""
        for path in {self.partial, self.data}:
            with contextlib.suppress(CheckpointError):
                # It may be complete, and only what came after the manifest have failed.
                if not folders.has_manifest(self.store, path) or path == self.partial:
                    self.store.remove(path)

    def _await_file(self, rank: int, record: FileRecord) -> None:
        path = self.file(rank)

        def there() -> bool:
            try:
                return self.store.size(path) == record.size
            except CheckpointNotFoundError:
                return False

        if not eventually(there):
            raise SharedStorageError(
                f"{path}: rank {rank} has written {record.size} bytes there, which rank 0 does not "
                "see; save to a file system or object store that all hosts share"
            )

    def tidy(self) -> None:
        """On rank 0, after :meth:`commit`: removes what is not needed any more. Takes long where
        removing does; nobody need wait for it."""
        # The checkpoint is complete. What cannot be removed now will be, after the next save.
        try:
            if not self.store.renames:
                self.store.remove(self.partial)
            for path in folders.superseded(self.store, self.root, self.place, self.keep_last):
                folders.discard(self.store, path)
            later = folders.places(self.store, self.root)[-1]
            if later > self.place:
                _warn(
                    f"{self.shown} is complete, but {later.name} beside it is later, and remains "
                    "the latest; remove it if it is of an earlier run"
                )
        except CheckpointError as error:
            _warn(
                f"{self.shown} is complete, but an older checkpoint could not be removed: {error}"
            )


def _warn(text: str) -> None:
    # Where warnings are errors, the checkpoint is complete all the same: nothing may undo it.
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=3)


def begin(
    meeting: Meeting,
    request: Request,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    extra: Any,
    random: DeviceRandomState,
) -> Draft:
    """Agrees on what is to be saved and where; on every rank. ``random``: as it was before.

    Raises:
        CheckpointError, TypeError, ValueError: it cannot be saved, or not there.
        SharedStorageError: a rank does not see the folder that rank 0 made.
    """
    opened: list[tuple[Store, str]] = []

    def describe() -> Contents:
        opened.append(open_store(request.path))
        return take_contents(model, optimizer, scheduler, request.step, extra, random)

    contents = agreed(meeting, describe)
    return place(meeting, request, opened[0], contents)


def agreed(meeting: Meeting, describe: Callable[[], Contents]) -> Contents:
    """What this rank has to save, which fits to what the others have.

    Raises:
        CheckpointError, TypeError, ValueError: it cannot be saved.
    """
    contents: list[Contents] = []

    def own() -> list[str]:
        contents.append(describe())
        return contents[0].agreement()

    agreements = meeting.together("describe what to save", own)
    for rank, agreement in enumerate(agreements):
        if agreement[0] == agreements[0][0] and agreement != agreements[0]:
            raise UnsupportedValueError(
                f"the optimizer of rank {rank} and that of rank 0 have different single values "
                "(such as step, or a statistic of the rank's shard); a checkpoint has one for all"
            )
        if agreement != agreements[0]:
            raise ModelMismatchError(
                f"rank {rank} and rank 0 have different models, optimizers or steps to save; "
                "all ranks must call this together, with the same"
            )
    return contents[0]


def place(
    meeting: Meeting, request: Request, opened: tuple[Store, str], contents: Contents
) -> Draft:
    """Agrees on where ``contents`` go; on every rank. Errors as :func:`begin`."""
    store, root = opened
    held: list[object] = []

    def prepare() -> list:
        save_id, version = _prepare(store, root, request.step)
        name = folders.Place(request.step, version).partial_name(save_id)
        held.append(store.hold(join(root, name)))
        return [save_id, version]

    save_id, version = meeting.first("prepare the folder", prepare)
    where = folders.Place(request.step, version)
    known = replace(contents.manifest, save_id=save_id)
    draft = Draft(
        store=store,
        root=root,
        place=where,
        folder=join(root, where.name),
        partial=join(root, where.partial_name(save_id)),
        shown=join(request.path.rstrip("/") or "/", where.name),
        contents=replace(contents, manifest=known),
        rank=meeting.rank,
        keep_last=request.keep_last,
        held=held,
    )
    try:
        meeting.together("see rank 0's folder", lambda: _require_shared(draft))
    except Exception:
        draft.give_up(meeting)
        raise
    return draft


def _prepare(store: Store, root: str, step: int) -> list:
    """Makes room, and the folder to write to. Returns the save's id and its number of the step."""
    store.make_folder(root)
    if store.renames:
        parent = root.rpartition("/")[0] or ("/" if root.startswith("/") else ".")
        with contextlib.suppress(CheckpointError):  # a parent that may not be read
            store.sync_folder(parent)
    for path in folders.leftovers(store, root):
        try:
            store.remove(path)
        except CheckpointError as error:  # that is no reason not to save
            _warn(f"a leftover could not be removed: {error}")
    place = folders.next_place(store, root, step)
    save_id = secrets.token_hex(8)
    partial = join(root, place.partial_name(save_id))
    store.make_folder(partial)
    if not store.renames:  # where there are no folders, only files are seen
        write(store, join(partial, _BEGUN), save_id.encode())
    return [save_id, place.version]


def _require_shared(draft: Draft) -> None:
    def seen() -> bool:
        if draft.store.renames:
            return draft.store.is_folder(draft.partial)
        return _BEGUN in draft.store.list(draft.partial)

    if not eventually(seen):
        raise SharedStorageError(
            f"{draft.root}: this rank does not see what rank 0 has written there; save to a file "
            "system or object store that all hosts share, or gather the model on rank 0 with "
            "full_state_dict()"
        )


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether ``condition()`` comes true soon; file systems over a network take their time."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    wait = 0.01
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(wait)
        wait = min(2 * wait, 1.0)
    return True
