"""``save_checkpoint``: saves a checkpoint and returns when it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from ..collectives.random_state import DeviceRandomState, synced_device
from ..consolidate.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ModelMismatchError,
    OtherRankError,
    SharedStorageError,
    UnsupportedValueError,
)
from ..consolidate.format import folders, manifest
from ..consolidate.format.rank_file import FileRecord, write_file
from ..consolidate.format.store import Store, join, open_store, read, write
from ..consolidate.format.strict import read_json, write_json
from .contents import Contents, list_contents
from .rank_exchange import RankExchange, describe

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


def save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int,
    extra: Any = None,
    keep_last: int | None = None,
) -> str:
    """Saves a checkpoint into a new folder ``step-XXXXXXXX`` in ``path``. Call it on every rank.

    Each rank writes its shards. The checkpoint can be loaded by any number of ranks and with any
    wrapping of the model (:func:`load_checkpoint`), and converted into one file
    (``python -m xla_fsdp.consolidate``). The folder appears only when the checkpoint is complete: a
    save that fails or is killed leaves all earlier checkpoints unchanged. Host memory: one tensor
    at a time.

    Args:
        path: a folder that all ranks share: local, mounted, or a URL of fsspec (``gs://...``).
        model: a module, wrapped in any way or not wrapped.
        optimizer: a torch optimizer of ``model.parameters()``. Its state must be tensors of the
            parameter's shape and plain values.
        scheduler: any object with a ``state_dict()`` of plain values.
        step: number of the training step, at least 0. A checkpoint of the same step is replaced.
        extra: a value made of None, numbers, strings, bytes, lists, tuples, dicts and small tensors
            (up to 1 MiB each). The value of rank 0 is saved.
        keep_last: number of steps to keep. Rank 0 removes older ones after the save, while the
            other ranks continue. Steps after this one are not removed. ``None`` keeps all.

    Returns:
        The path of the checkpoint's folder.

    Raises:
        TypeError, ValueError, UnsupportedValueError: an argument cannot be saved.
        OutputError: no space, no permission, or an I/O error.
        SharedStorageError: the ranks do not see each other's files.
        ModelMismatchError: the ranks save different models, optimizers or steps.
        OtherRankError: another rank failed. If one rank raises, all ranks do.
    """
    exchange = RankExchange()
    with synced_device() as random:
        request = validate_request(exchange, path, step, keep_last)
        incomplete = begin_save(exchange, request, model, optimizer, scheduler, extra, random)
        try:
            written = exchange.run_and_gather("write its file", lambda: asdict(incomplete.write()))
            saved = exchange.run_on_first_rank(
                "complete the checkpoint", lambda: incomplete.commit(records(written))
            )
        except Exception:
            incomplete.remove_on_failure(exchange)
            raise
    if exchange.rank == 0:  # the other ranks continue training
        incomplete.remove_old_checkpoints()
    return saved


def validate_request(
    exchange: RankExchange, path: str | os.PathLike, step: int, keep_last: int | None
) -> Request:
    """Validates the arguments on all ranks."""
    return exchange.run_on_each_rank(
        "save with these arguments", lambda: Request(os.fsdecode(path), step, keep_last)
    )


def records(written: list[dict[str, Any]]) -> list[FileRecord]:
    """The file records of all ranks, from the values that they sent as JSON."""
    return [FileRecord(**{**each, "digests": tuple(each["digests"])}) for each in written]


# Longest time, in seconds, between two checks for the files of other ranks.
_LONGEST_WAIT = 0.5
# Seconds after which rank 0 must see the files that the other ranks have written.
_SECONDS_AFTER_WRITTEN = 30.0
# Seconds that rank 0 waits for the other ranks' files after its main thread has ended.
_SECONDS_AFTER_EXIT = 120.0


class AsyncCheckpointer:
    """Saves as :func:`save_checkpoint` does, but blocks training only for the copy to the host.

    On each rank, a thread writes the rank's file. The thread of rank 0 completes the checkpoint
    when all files are written. Ranks report to rank 0 through small files, not through collectives,
    so the devices continue training. Only one save runs at a time: the next ``save`` waits for the
    previous one. An error is raised on all ranks by the next call of a method. Call all methods on
    every rank. As a context manager, it waits for the last save at the end::

        with xla_fsdp.AsyncCheckpointer("runs/vit", keep_last=3) as checkpointer:
            for step in range(1, steps + 1):
                ...
                if step % 1000 == 0:
                    checkpointer.save(model, optimizer, scheduler, step=step)

    Host memory: a copy of the rank's shards and buffers, until they are written.

    Args:
        path, keep_last: see :func:`save_checkpoint`.
    """

    def __init__(self, path: str | os.PathLike, *, keep_last: int | None = None) -> None:
        self.path = path
        self.keep_last = keep_last
        self._running: RunningSave | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        step: int,
        extra: Any = None,
    ) -> None:
        """Starts a save and returns when all values are copied to the host.

        Training may change the model after that. The arguments are those of
        :func:`save_checkpoint`.

        Raises:
            CheckpointError: the previous save failed, and this one was not started; or this one
                cannot start, see :func:`save_checkpoint`.
        """
        with synced_device() as random:
            self.wait()
            exchange = RankExchange()
            request = validate_request(exchange, self.path, step, self.keep_last)
            incomplete = begin_save(exchange, request, model, optimizer, scheduler, extra, random)
            try:
                contents = exchange.run_on_each_rank(
                    "copy to the host", incomplete.contents.on_host
                )
            except Exception:
                incomplete.remove_on_failure(exchange)
                raise
        self._running = RunningSave(replace(incomplete, contents=contents), exchange)

    def wait(self) -> str | None:
        """Waits until the running save is complete and returns the path of its checkpoint.

        Returns ``None`` if no save is running.

        Raises:
            CheckpointError: the checkpoint could not be saved. Earlier checkpoints are unchanged.
        """
        running, self._running = self._running, None
        # Also without a running save: a resumed run has none at first, and must act the same.
        with synced_device():
            path = None if running is None else running.finish()
        if running is not None:
            running.wait_for_removal()  # rank 0 waits here, the other ranks do not
        return path

    def close(self) -> None:
        """Same as :meth:`wait`, so that the object can be closed like a file."""
        self.wait()

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.wait()
        # After an exception, other ranks may not reach a barrier. The thread ends on its own.


class RunningSave:
    """A save that is running on this rank.

    Its thread is not a daemon thread: a process that ends without waiting still finishes its file.
    """

    def __init__(self, incomplete: IncompleteSave, exchange: RankExchange) -> None:
        self.incomplete = incomplete
        self.exchange = exchange
        self._error: Exception | None = None
        self._path: str | None = None
        self._written = threading.Event()
        self._cancelled = threading.Event()
        self._all_wrote = threading.Event()
        # Set when the save is complete or has failed. Rank 0 may still be removing old checkpoints.
        self._finished = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            name=f"xla_fsdp checkpoint, rank {incomplete.rank}",
            daemon=False,  # the default is that of the current thread, which may be a daemon
        )
        self._thread.start()

    def finish(self) -> str:
        """Waits for all ranks and returns the path; raises on every rank if one of them failed."""
        self._written.wait()
        try:
            self.exchange.run_and_gather("write its file", self._raise)
            self._all_wrote.set()
            self._finished.wait()
            self._path = self.exchange.run_on_first_rank("complete the checkpoint", self._result)
        except Exception:
            self._cancelled.set()
            self._thread.join()
            self.exchange.gather_values("stop writing", None)
            self.incomplete.remove_on_failure(self.exchange)
            raise
        return self._path

    def _result(self) -> str | None:
        self._raise()
        return self._path

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def wait_for_removal(self) -> None:
        """Waits until the checkpoints that this one replaces are removed."""
        self._thread.join()

    def is_finished(self) -> bool:
        """Whether this rank has finished, so that :meth:`finish` does not wait for it."""
        return self._finished.is_set()

    def _run(self) -> None:
        try:
            record = self._write()
            if self.incomplete.rank == 0:
                self._path = self._complete(record)
        except Exception as error:
            self._fail(error)
        finally:
            self._finished.set()
        if self.incomplete.rank == 0 and self._error is None and self._path is not None:
            self.incomplete.remove_old_checkpoints()
        # Frees the copies on the host.
        self.incomplete = replace(
            self.incomplete, contents=replace(self.incomplete.contents, items=[])
        )

    def _write(self) -> FileRecord:
        try:
            record = self.incomplete.write()
            self._announce("record", asdict(record))
        except Exception as error:
            self._error = error  # set before `_written`, which other threads wait for
            raise
        finally:
            self._written.set()
        return record

    def _fail(self, error: Exception) -> None:
        self._error = error
        # This may fail too (disk full). Then the next call on this rank reports the error to all.
        with contextlib.suppress(CheckpointError):
            self._announce("failed", describe(error))

    def _complete(self, own: FileRecord) -> str | None:
        """On rank 0: waits for the files of all ranks, then completes the checkpoint."""
        found: dict[int, dict[str, Any]] = {0: asdict(own)}
        wait, alone_since, wrote_since = 0.01, None, None
        while len(found) < self.exchange.size:
            if self._cancelled.wait(wait):
                return None
            wait = min(2 * wait, _LONGEST_WAIT)
            self._collect(found)
            if self._all_wrote.is_set():  # all files exist, and should become visible soon
                wrote_since = wrote_since or time.monotonic()
                late = time.monotonic() > wrote_since + _SECONDS_AFTER_WRITTEN
                if len(found) < self.exchange.size and late:
                    raise SharedStorageError(
                        f"{self.incomplete.partial}: other ranks wrote files there that rank 0 "
                        "does not see. Save to a file system or object store that all hosts share."
                    )
            if not threading.main_thread().is_alive():  # `finish` will not be called any more
                alone_since = alone_since or time.monotonic()
                if time.monotonic() > alone_since + _SECONDS_AFTER_EXIT:
                    raise OtherRankError(
                        "the program ended before all ranks wrote their files. Call wait() or "
                        "close() before the program ends."
                    )
        self._remove_announcements()
        return self.incomplete.commit(records([found[rank] for rank in range(self.exchange.size)]))

    def _collect(self, found: dict[int, dict[str, Any]]) -> None:
        store, folder = self.incomplete.store, self.incomplete.partial
        names = set(store.list(folder))
        new = [rank for rank in range(self.exchange.size) if rank not in found]
        for rank in new:
            name = _announcement(rank, "failed")
            if name in names:
                reason = _read_when_complete(store, join(folder, name))
                raise OtherRankError(f"rank {rank} could not write its file: {reason}")
        there = [rank for rank in new if _announcement(rank, "record") in names]
        paths = [join(folder, _announcement(rank, "record")) for rank in there]
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            read_records = pool.map(lambda path: _read_when_complete(store, path), paths)
            found.update(zip(there, read_records, strict=True))

    def _announce(self, kind: str, value: Any) -> None:
        if self.incomplete.rank == 0 or self.exchange.size == 1:
            return
        path = join(self.incomplete.partial, _announcement(self.incomplete.rank, kind))
        write(self.incomplete.store, path, write_json([value]))

    def _remove_announcements(self) -> None:
        store = self.incomplete.store
        ranks = range(1, self.exchange.size)
        paths = [join(self.incomplete.partial, _announcement(rank, "record")) for rank in ranks]
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            list(pool.map(store.remove, paths))


def _announcement(rank: int, kind: str) -> str:
    return f"rank-{rank:05d}.{kind}"


def _read_when_complete(store: Store, path: str) -> Any:
    """The content of an announcement file. The file may be visible before its content is."""
    for _ in range(100):
        data = read(store, path, 0, store.size(path))
        if data.endswith(b"]"):
            try:
                return read_json(data, "announcement")[0]
            except CheckpointError:
                pass
        time.sleep(0.05)
    raise OtherRankError(f"{path}: this status file of another rank stays incomplete. Save again.")
