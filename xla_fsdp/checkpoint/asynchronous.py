"""``AsyncCheckpointer`` writes a checkpoint while training continues."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from ..collectives.random_state import synced_device
from ..consolidate.errors import CheckpointError, OtherRankError, SharedStorageError
from ..consolidate.format.rank_file import FileRecord
from ..consolidate.format.store import Store, join, read, write
from ..consolidate.format.strict import read_json, write_json
from .incomplete_save import MAX_CONCURRENT_REQUESTS, IncompleteSave, begin_save
from .rank_exchange import RankExchange, describe
from .saving import records, validate_request

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
