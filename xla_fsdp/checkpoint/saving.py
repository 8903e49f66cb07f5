"""``save_checkpoint``, which returns when a checkpoint is complete, and ``AsyncCheckpointer``."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

from torch import nn

from ..collectives.random_state import DeviceRandomState, synced_device
from ..consolidate.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ModelMismatchError,
    OtherRankError,
    OutputError,
    SharedStorageError,
    UnsupportedValueError,
)
from ..consolidate.format import folders, manifest
from ..consolidate.format.rank_file import FileRecord, write_file
from ..consolidate.format.store import Store, join, open_store, path_text, read, write
from ..consolidate.format.strict import read_json, write_json
from .contents import Contents, list_contents
from .rank_exchange import RankExchange, describe_error, wait_until

_STARTED_FILE = "begun"
_MAX_CONCURRENT_REQUESTS = 32
_LONGEST_WAIT = 0.5
# Seconds that rank 0 waits after its main thread has ended.
_SECONDS_AFTER_EXIT = 120.0


T = TypeVar("T")


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

    Any number of ranks can load it, with any wrapping of the model (:func:`load_checkpoint`). A
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
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    with synced_device() as random:
        state = model, optimizer, scheduler, step, extra
        contents = agree_on_contents(exchange, random, keep_last, *state)
        incomplete = begin_save(exchange, path, keep_last, contents)
        with incomplete.removed_on_failure(exchange):
            written = exchange.run_and_gather("write its file", incomplete.write)
            saved: str = exchange.run_on_first_rank(
                "complete the checkpoint", lambda: incomplete.commit(written)
            )
    if exchange.rank == 0:
        incomplete.remove_old_checkpoints()
    return saved


class AsyncCheckpointer:
    """Saves as :func:`save_checkpoint` does, but blocks training only for the copy to the host.

    The next ``save`` waits for the previous one. An error is raised on all ranks by the next call
    of a method. Call all methods on every rank. As a context manager, it waits for the last save at
    the end. Host memory: a copy of the rank's shards and buffers, until they are written.

    Args:
        path, keep_last: see :func:`save_checkpoint`.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(self, path: str | os.PathLike, *, keep_last: int | None = None) -> None:
        path_text(path)
        require_keep_last(keep_last)
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
        """Starts a save. When it returns, all values are copied and training may change the model.

        The arguments are those of :func:`save_checkpoint`.

        Raises:
            CheckpointError: the previous save failed, and this one was not started; or this one
                cannot start.
        """
        with synced_device() as random:
            self.wait()
            exchange = RankExchange()
            state = model, optimizer, scheduler, step, extra
            contents = agree_on_contents(exchange, random, self.keep_last, *state)
            contents = exchange.run_on_each_rank("copy to the host", contents.on_host)
            incomplete = begin_save(exchange, self.path, self.keep_last, contents)
        self._running = RunningSave(incomplete, exchange)

    def wait(self) -> str | None:
        """Waits for the running save. Returns the path of its checkpoint, or ``None`` without one.

        Raises:
            CheckpointError: the checkpoint could not be saved. Earlier checkpoints are unchanged.
        """
        running, self._running = self._running, None
        # Also without a running save: a resumed run must do the same as others.
        with synced_device():
            return None if running is None else running.finish()

    def close(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.wait()
        # After an exception, other ranks may not reach a barrier.


@dataclass(frozen=True)
class IncompleteSave:
    """A save that is not complete yet.

    Attributes:
        root: the folder of all checkpoints, in the store. The user wrote it as ``path``.
        place: step and version of this one.
        locks: on rank 0, the lock by which other saves see that this one is running.
    """

    store: Store
    root: str
    path: str
    place: folders.CheckpointFolder
    contents: Contents
    rank: int
    keep_last: int | None
    locks: Sequence[object] = ()

    @property
    def folder(self) -> str:
        return join(self.root, self.place.name)

    @property
    def display_path(self) -> str:
        """:attr:`folder` as the user would write it, for messages."""
        return join(self.path.rstrip("/") or "/", self.place.name)

    @property
    def partial(self) -> str:
        """The folder for temporary files, and if the store can rename folders, for the data."""
        return join(self.root, self.place.partial_name(self.contents.manifest.save_id))

    @property
    def data(self) -> str:
        return self.partial if self.store.renames else self.folder

    def file(self, rank: int) -> str:
        return join(self.data, manifest.file_name(rank, self.contents.manifest.world_size))

    def write(self) -> dict[str, Any]:
        """Writes this rank's file durably. Returns its :class:`FileRecord` as a JSON object."""
        record = write_file(
            self.store, self.file(self.rank), self.contents.items, self.contents.metadata(self.rank)
        )
        self.store.sync_folder(self.data)
        return vars(record)

    def commit(self, written: Sequence[dict[str, Any]]) -> str:
        """Completes the checkpoint and returns its path. Called on rank 0 after all ranks wrote.

        Raises OutputError if another save removed the files, SharedStorageError if a file is not
        visible.
        """
        if not self.store.renames and _STARTED_FILE not in self.store.list(self.partial):
            raise OutputError(
                f"{self.display_path}: another save into the same folder removed the files of this "
                "one. An object store has no locks: wait for the running save (AsyncCheckpointer."
                "wait()) before you start another one, or save to different folders."
            )
        records = [FileRecord(**each) for each in written]
        _run_concurrently(self._await_file, list(enumerate(records)))
        complete = replace(self.contents.manifest, files=tuple(records))
        write(self.store, join(self.data, manifest.NAME), manifest.dump_manifest(complete))
        self.store.sync_folder(self.data)
        if self.store.renames:
            self.store.rename(self.partial, self.folder)
        return self.display_path

    @contextlib.contextmanager
    def removed_on_failure(self, exchange: RankExchange) -> Iterator[None]:
        """A context in which all ranks fail or none. Then rank 0 removes the files of this save."""
        try:
            yield
        except Exception:
            if self.rank == 0:
                self.remove_files()
            exchange.gather_values("give up the save", None)
            raise

    def remove_files(self) -> None:
        """Removes the files of this save. Called on rank 0 when no rank writes any more."""
        for path in {self.partial, self.data}:
            with contextlib.suppress(CheckpointError):
                # The failure may have come after the manifest.
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
        """Removes old checkpoints and temporary files. Called on rank 0; may take long."""
        # The next save removes what cannot be removed now.
        try:
            if not self.store.renames:
                self.store.remove(self.partial)
            for path in folders.find_superseded(self.store, self.root, self.place, self.keep_last):
                folders.remove_checkpoint(self.store, path)
            later = max(folders.list_folders(self.store, self.root), default=self.place)
            if later > self.place:
                _warn_only(
                    f"{self.display_path} is complete, but the same folder has {later.name}, which "
                    "is later and remains the latest checkpoint. Remove it if it belongs to an "
                    "earlier run."
                )
        except CheckpointError as error:
            _warn_only(
                f"{self.display_path} is complete, but an older checkpoint could not be removed: "
                f"{error}"
            )


def _run_concurrently(work: Callable[..., T], arguments: Sequence[tuple]) -> list[T]:
    """An executor would not work while the interpreter ends and a :class:`RunningSave` runs."""
    try:
        pool = ThreadPool(min(_MAX_CONCURRENT_REQUESTS, len(arguments) or 1))
    except RuntimeError:  # Python 3.12 starts no thread while the interpreter ends
        return [work(*each) for each in arguments]
    with pool:
        return pool.starmap(work, arguments, chunksize=1)


def _warn_only(text: str) -> None:
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=3)


def require_keep_last(keep_last: Any) -> None:
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"keep_last must be an int of at least 1, or None, got {keep_last!r}")


def agree_on_contents(
    exchange: RankExchange,
    random: DeviceRandomState,
    keep_last: int | None,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    step: int,
    extra: Any,
) -> Contents:
    """What this rank saves. Raises for invalid arguments, or if it differs between ranks."""

    def describe() -> tuple[Contents, list[str]]:
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step must be an int, got {type(step).__name__}")
        if not 0 <= step < 10**18:
            raise ValueError(f"step must be at least 0 and less than 10**18, got {step}")
        require_keep_last(keep_last)
        contents = list_contents(model, optimizer, scheduler, step, extra, random)
        return contents, contents.agreement()

    contents, agreements = exchange.run("describe what to save", describe)
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
    return contents


def begin_save(
    exchange: RankExchange, path: str | os.PathLike, keep_last: int | None, contents: Contents
) -> IncompleteSave:
    """Makes the partial folder. Called on every rank."""
    store, root = exchange.run_on_each_rank("open the folder", lambda: open_store(path))
    if store.renames:
        root = os.path.abspath(root)  # a thread uses it after a chdir, too
    step = contents.manifest.step

    def prepare() -> tuple[list[object], Any]:
        if exchange.rank:
            return [], None
        save_id, version = _start_save(store, root, step)
        name = folders.CheckpointFolder(step, version).partial_name(save_id)
        return [store.hold_lock(join(root, name))], [save_id, version]

    locks, prepared = exchange.run("prepare the folder", prepare)
    save_id, version = prepared[0]
    incomplete = IncompleteSave(
        store=store,
        root=root,
        path=os.fsdecode(path),
        place=folders.CheckpointFolder(step, version),
        contents=replace(contents, manifest=replace(contents.manifest, save_id=save_id)),
        rank=exchange.rank,
        keep_last=keep_last,
        locks=locks,
    )

    def seen() -> bool:
        if store.renames:
            return store.is_folder(incomplete.partial)
        return _STARTED_FILE in store.list(incomplete.partial)

    def require_shared() -> None:
        if not wait_until(seen):
            raise SharedStorageError(
                f"{root}: this rank does not see the folder that rank 0 made there. Save to a file "
                "system or object store that all hosts share, or gather the model on rank 0 with "
                "full_state_dict()."
            )

    with incomplete.removed_on_failure(exchange):
        exchange.run_and_gather("see rank 0's folder", require_shared)
    return incomplete


def _start_save(store: Store, root: str, step: int) -> list:
    store.make_folder(root)
    for path in folders.find_leftovers(store, root):
        try:
            store.remove(path)
        except CheckpointError as error:
            _warn_only(f"a leftover of an earlier save could not be removed: {error}")
    place = folders.next_folder(store, root, step)
    save_id = secrets.token_hex(8)
    partial = join(root, place.partial_name(save_id))
    store.make_folder(partial)
    if not store.renames:  # an object store has no empty folders
        write(store, join(partial, _STARTED_FILE), save_id.encode())
    return [save_id, place.version]


class RunningSave:
    """A save that is running on this rank.

    Its thread is not a daemon thread: a process that ends without waiting still finishes its file.
    """

    def __init__(self, incomplete: IncompleteSave, exchange: RankExchange) -> None:
        self.incomplete = incomplete
        self.exchange = exchange
        self._written: Future[dict[str, Any]] = Future()
        self._completed: Future[str | None] = Future()
        self._records: list[dict[str, Any]] | None = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            name=f"xla_fsdp checkpoint, rank {incomplete.rank}",
            daemon=False,  # the current thread may be one
        )
        self._thread.start()

    def finish(self) -> str:
        """Waits for all ranks and returns the path; raises on every rank if one of them failed."""
        with self.incomplete.removed_on_failure(self.exchange):
            try:
                self._records = self.exchange.run_and_gather("write its file", self._written.result)
                path: str = self.exchange.run_on_first_rank(
                    "complete the checkpoint", self._completed.result
                )
            except Exception:
                self._cancelled.set()
                self._thread.join()
                self.exchange.gather_values("stop writing", None)
                raise
        self._thread.join()  # until old checkpoints are removed: only rank 0 waits
        return path

    def is_finished(self) -> bool:
        """Whether :meth:`finish` does not have to wait for this rank."""
        return self._completed.done()

    def _run(self) -> None:
        try:
            try:
                record = self.incomplete.write()
                self._announce(record)
            except Exception as error:
                self._written.set_exception(error)
                raise
            self._written.set_result(record)
            path = self._complete(record) if self.incomplete.rank == 0 else None
        except Exception as error:
            # This may fail too (disk full). Then the next call reports it to all ranks.
            with contextlib.suppress(CheckpointError):
                self._announce(None, describe_error(error))
            self._completed.set_exception(error)
        else:
            self._completed.set_result(path)
            if path is not None:
                self.incomplete.remove_old_checkpoints()
        self.incomplete = replace(
            self.incomplete, contents=replace(self.incomplete.contents, items=[])
        )

    def _complete(self, own: dict[str, Any]) -> str | None:
        """On rank 0: waits for the files of all ranks, then completes the checkpoint."""
        found: dict[int, dict[str, Any]] = {0: own}
        wait = 0.01
        alone_since: float | None = None
        while self._records is None and len(found) < self.exchange.size:
            if self._cancelled.wait(wait):
                return None
            wait = min(2 * wait, _LONGEST_WAIT)
            self._collect(found)
            if not threading.main_thread().is_alive():  # nothing calls `finish`
                alone_since = alone_since or time.monotonic()
                if time.monotonic() > alone_since + _SECONDS_AFTER_EXIT:
                    raise OtherRankError(
                        "the program ended before all ranks wrote their files. Call wait() or "
                        "close() before the program ends."
                    )
        records = self._records or [found[rank] for rank in range(self.exchange.size)]
        paths = [self._announcement(rank) for rank in range(1, self.exchange.size)]
        _run_concurrently(self.incomplete.store.remove, [(path,) for path in paths])
        return self.incomplete.commit(records)

    def _collect(self, found: dict[int, dict[str, Any]]) -> None:
        store = self.incomplete.store
        names = set(store.list(self.incomplete.partial))

        def content(rank: int) -> list[Any]:
            path = self._announcement(rank)
            announced: list[Any] = read_json(read(store, path, 0, store.size(path)), path)
            return announced

        new = [
            rank
            for rank in range(self.exchange.size)
            if rank not in found and self._announcement(rank).rpartition("/")[2] in names
        ]
        announced = _run_concurrently(content, [(rank,) for rank in new])
        for rank, (record, failure) in zip(new, announced, strict=True):
            if failure is not None:
                raise OtherRankError(f"rank {rank} could not write its file: {failure}")
            found[rank] = record

    def _announce(self, record: dict[str, Any] | None, failure: str | None = None) -> None:
        if self.incomplete.rank == 0 or self.exchange.size == 1:
            return
        store, path = self.incomplete.store, self._announcement(self.incomplete.rank)
        written = f"{path}.new" if store.renames else path
        write(store, written, write_json([record, failure]))
        if store.renames:  # the file must not be visible before its content
            store.rename(written, path)

    def _announcement(self, rank: int) -> str:
        return join(self.incomplete.partial, f"rank-{rank:05d}.outcome")
