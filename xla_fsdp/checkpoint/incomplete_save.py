"""A save that is not complete yet. All functions that save use this module.

Every rank writes one file into a partial folder. When all files are durable, rank 0 writes the
manifest and renames the folder, which makes it a checkpoint. A failure before that leaves earlier
checkpoints unchanged; the next save removes the partial folder.
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
from .contents import Contents, list_contents
from .rank_exchange import RankExchange

# Longest time, in seconds, until a file that one host wrote is visible on another host.
_VISIBLE_SECONDS = 30.0
_STARTED_FILE = "begun"
# Maximum number of concurrent requests of rank 0 to the store.
MAX_CONCURRENT_REQUESTS = 32


@dataclass(frozen=True)
class Request:
    """The user's arguments, validated."""

    path: str
    step: int
    keep_last: int | None

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise TypeError(f"step must be an int, got {type(self.step).__name__}")
        if not 0 <= self.step < 10**18:
            raise ValueError(f"step must be at least 0 and less than 10**18, got {self.step}")
        kept = self.keep_last
        if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or kept < 1):
            raise ValueError(f"keep_last must be an int of at least 1, or None, got {kept!r}")


@dataclass(frozen=True)
class IncompleteSave:
    """An incomplete save.

    Attributes:
        folder: path of the complete checkpoint.
        partial: folder for files that are not part of the checkpoint. In a store that can rename
            folders, it also has the files of the checkpoint until the save is complete.
        display_path: ``folder`` as the user would write it, for messages.
        locks: on rank 0, the lock of the partial folder. While it exists, other saves see that
            this one is running.
    """

    store: Store
    root: str
    place: folders.CheckpointFolder
    folder: str
    partial: str
    display_path: str
    contents: Contents
    rank: int
    keep_last: int | None
    locks: Sequence[object] = ()

    @property
    def data(self) -> str:
        """The folder into which the ranks write their files."""
        return self.partial if self.store.renames else self.folder

    def file(self, rank: int) -> str:
        return join(self.data, manifest.file_name(rank, self.contents.manifest.world_size))

    def write(self) -> FileRecord:
        """Writes this rank's file. The file is durable when this returns."""
        record = write_file(
            self.store, self.file(self.rank), self.contents.items, self.contents.metadata(self.rank)
        )
        self.store.sync_folder(self.data)
        return record

    def commit(self, records: Sequence[FileRecord]) -> str:
        """Completes the checkpoint and returns its path. Called on rank 0 after all ranks wrote.

        :meth:`remove_old_checkpoints` later removes the checkpoints that this one replaces.
        """
        # A request to an object store takes long, and there may be thousands of files.
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            list(pool.map(self._await_file, range(len(records)), records))
        complete = replace(self.contents.manifest, files=tuple(records))
        write(self.store, join(self.data, manifest.NAME), manifest.dump_manifest(complete))
        self.store.sync_folder(self.data)
        if self.store.renames:
            self.store.rename(self.partial, self.folder)
        return self.display_path

    def remove_on_failure(self, exchange: RankExchange) -> None:
        """Calls :meth:`remove_files` on rank 0, and waits for it on all ranks, after a failure."""
        if self.rank == 0:
            self.remove_files()
        exchange.gather_values("give up the save", None)

    def remove_files(self) -> None:
        """Removes the files of this save, as far as possible. Called on rank 0 when no rank writes
        any more."""
        for path in {self.partial, self.data}:
            with contextlib.suppress(CheckpointError):
                # The checkpoint may be complete: the failure may have come after the manifest.
                if not folders.has_manifest(self.store, path) or path == self.partial:
                    self.store.remove(path)

    def _await_file(self, rank: int, record: FileRecord) -> None:
        path = self.file(rank)

        def there() -> bool:
            try:
                return self.store.size(path) == record.size
            except CheckpointNotFoundError:
                return False

        if not wait_until(there):
            raise SharedStorageError(
                f"{path}: rank {rank} has written {record.size} bytes there, but rank 0 does not "
                "see them. Save to a file system or object store that all hosts share."
            )

    def remove_old_checkpoints(self) -> None:
        """Removes old checkpoints and temporary files. Called on rank 0 after :meth:`commit`.

        Removing may take long; the other ranks do not wait for it.
        """
        # The checkpoint is complete. The next save removes what cannot be removed now.
        try:
            if not self.store.renames:
                self.store.remove(self.partial)
            for path in folders.find_superseded(self.store, self.root, self.place, self.keep_last):
                folders.remove_checkpoint(self.store, path)
            later = folders.list_folders(self.store, self.root)[-1]
            if later > self.place:
                _warn(
                    f"{self.display_path} is complete, but the same folder has {later.name}, which "
                    "is later and remains the latest checkpoint. Remove it if it belongs to an "
                    "earlier run."
                )
        except CheckpointError as error:
            _warn(
                f"{self.display_path} is complete, but an older checkpoint could not be removed: "
                f"{error}"
            )


def _warn(text: str) -> None:
    # If warnings are errors, ignore the exception: the checkpoint is complete.
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=3)


def begin_save(
    exchange: RankExchange,
    request: Request,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    extra: Any,
    random: DeviceRandomState,
) -> IncompleteSave:
    """Starts a save: all ranks check their values and the folder. Called on every rank.

    ``random``: the random state of the device before the save.

    Raises:
        CheckpointError, TypeError, ValueError: a value cannot be saved, or the path is not usable.
        SharedStorageError: a rank does not see the folder that rank 0 made.
    """
    opened: list[tuple[Store, str]] = []

    def describe() -> Contents:
        opened.append(open_store(request.path))
        return list_contents(model, optimizer, scheduler, request.step, extra, random)

    contents = agree_on_contents(exchange, describe)
    return create_folder(exchange, request, opened[0], contents)


def agree_on_contents(exchange: RankExchange, describe: Callable[[], Contents]) -> Contents:
    """Returns the contents of this rank's file, after a check that they match those of other ranks.

    Raises:
        UnsupportedValueError, ModelMismatchError: the ranks have different models, optimizers,
            steps or single values of optimizer state.
        CheckpointError, TypeError, ValueError: a value cannot be saved.
    """
    contents: list[Contents] = []

    def own() -> list[str]:
        contents.append(describe())
        return contents[0].agreement()

    agreements = exchange.run_and_gather("describe what to save", own)
    for rank, agreement in enumerate(agreements):
        if agreement[0] == agreements[0][0] and agreement != agreements[0]:
            raise UnsupportedValueError(
                f"the optimizers of rank {rank} and rank 0 have different single values "
                "(such as step, or a statistic of the rank's shard). A checkpoint stores one value "
                "for all ranks: make them equal, or save without the optimizer."
            )
        if agreement != agreements[0]:
            raise ModelMismatchError(
                f"rank {rank} and rank 0 save different models, optimizers or steps. Call this on "
                "all ranks with the same model, optimizer and step."
            )
    return contents[0]


def create_folder(
    exchange: RankExchange, request: Request, opened: tuple[Store, str], contents: Contents
) -> IncompleteSave:
    """Makes the partial folder for ``contents``. Called on every rank.

    Raises as :func:`begin_save`.
    """
    store, root = opened
    locks: list[object] = []

    def prepare() -> list:
        save_id, version = _prepare(store, root, request.step)
        name = folders.CheckpointFolder(request.step, version).partial_name(save_id)
        locks.append(store.hold_lock(join(root, name)))
        return [save_id, version]

    save_id, version = exchange.run_on_first_rank("prepare the folder", prepare)
    where = folders.CheckpointFolder(request.step, version)
    known = replace(contents.manifest, save_id=save_id)
    incomplete = IncompleteSave(
        store=store,
        root=root,
        place=where,
        folder=join(root, where.name),
        partial=join(root, where.partial_name(save_id)),
        display_path=join(request.path.rstrip("/") or "/", where.name),
        contents=replace(contents, manifest=known),
        rank=exchange.rank,
        keep_last=request.keep_last,
        locks=locks,
    )
    try:
        exchange.run_and_gather("see rank 0's folder", lambda: _raise_if_not_shared(incomplete))
    except Exception:
        incomplete.remove_on_failure(exchange)
        raise
    return incomplete


def _prepare(store: Store, root: str, step: int) -> list:
    """Removes leftovers and makes the partial folder. Returns the id and the version of the save.

    The version counts the saves of the same step.
    """
    store.make_folder(root)
    if store.renames:
        parent = root.rpartition("/")[0] or ("/" if root.startswith("/") else ".")
        with contextlib.suppress(CheckpointError):  # no permission to read the parent
            store.sync_folder(parent)
    for path in folders.find_leftovers(store, root):
        try:
            store.remove(path)
        except CheckpointError as error:  # the save can continue
            _warn(f"a leftover of an earlier save could not be removed: {error}")
    place = folders.next_folder(store, root, step)
    save_id = secrets.token_hex(8)
    partial = join(root, place.partial_name(save_id))
    store.make_folder(partial)
    if not store.renames:  # an object store has no empty folders: mark it with a file
        write(store, join(partial, _STARTED_FILE), save_id.encode())
    return [save_id, place.version]


def _raise_if_not_shared(incomplete: IncompleteSave) -> None:
    def seen() -> bool:
        if incomplete.store.renames:
            return incomplete.store.is_folder(incomplete.partial)
        return _STARTED_FILE in incomplete.store.list(incomplete.partial)

    if not wait_until(seen):
        raise SharedStorageError(
            f"{incomplete.root}: this rank does not see the folder that rank 0 made there. Save to "
            "a file system or object store that all hosts share, or gather the model on rank 0 "
            "with full_state_dict()."
        )


def wait_until(condition: Callable[[], bool]) -> bool:
    """Waits up to 30 s until ``condition()`` is true, and returns whether it is.

    On network file systems, a file becomes visible on other hosts with a delay.
    """
    deadline = time.monotonic() + _VISIBLE_SECONDS
    wait = 0.01
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(wait)
        wait = min(2 * wait, 1.0)
    return True
