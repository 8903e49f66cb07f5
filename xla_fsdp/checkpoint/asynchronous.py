"""``AsyncCheckpointer``: training goes on while the checkpoint is written."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from ..collectives.random_state import at_rest
from ..consolidate.errors import CheckpointError, OtherRankError, SharedStorageError
from ..consolidate.format.rank_file import FileRecord
from ..consolidate.format.store import Store, join, read, write
from ..consolidate.format.strict import read_json, write_json
from .draft import AT_ONCE, Draft, begin
from .meeting import Meeting, describe
from .saving import meeting_request, records

# Seconds between two looks for what other ranks have written, at most.
_LONGEST_WAIT = 0.5
# Seconds until rank 0 must see what the others say they have written.
_PATIENCE_ONCE_WRITTEN = 30.0
# Seconds that rank 0 waits for the others' files once its program has ended.
_PATIENCE_AT_EXIT = 120.0


class AsyncCheckpointer:
    """Saves as :func:`save_checkpoint` does, but only the copy to the host blocks.

    A thread of each rank writes that rank's file, and rank 0's completes the checkpoint once all
    files are there; ranks tell each other through small files, never through the devices, which go
    on training. One save is under way at a time: the next one first waits for it. Errors are
    raised, on all ranks, by the next call. All methods must be called on every rank. As a context
    manager it waits at the end::

        with xla_fsdp.AsyncCheckpointer("runs/vit", keep_last=3) as checkpointer:
            for step in range(1, steps + 1):
                ...
                if step % 1000 == 0:
                    checkpointer.save(model, optimizer, scheduler, step=step)

    Memory on the host: a copy of what the rank holds, until it is written.

    Args:
        path, keep_last: as in :func:`save_checkpoint`.
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
        """Begins to save; returns when everything is copied, so that training may change it.

        Raises:
            CheckpointError: the save before this one failed (this one is not begun), or this one
                cannot begin; see :func:`save_checkpoint`.
        """
        with at_rest() as random:
            self.wait()
            meeting = Meeting()
            request = meeting_request(meeting, self.path, step, self.keep_last)
            draft = begin(meeting, request, model, optimizer, scheduler, extra, random)
            try:
                contents = meeting.each("copy to the host", draft.contents.on_host)
            except Exception:
                draft.give_up(meeting)
                raise
        self._running = RunningSave(replace(draft, contents=contents), meeting)

    def wait(self) -> str | None:
        """Returns the path of the last checkpoint once it is complete, ``None`` if there was none.

        Raises:
            CheckpointError: it could not be saved. Earlier checkpoints are as they were.
        """
        running, self._running = self._running, None
        with at_rest():  # whether or not there is one: a resumed run has none at first
            path = None if running is None else running.finish()
        if running is not None:
            running.tidied()  # on rank 0; the others go on
        return path

    def close(self) -> None:
        """:meth:`wait`, under the name that files have."""
        self.wait()

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.wait()
        # After an exception other ranks may be anywhere: this rank's thread ends by itself.


class RunningSave:
    """A save under way on this rank.

    Its thread is no daemon: a process that ends without waiting still completes what it can.
    """

    def __init__(self, draft: Draft, meeting: Meeting) -> None:
        self.draft = draft
        self.meeting = meeting
        self._error: Exception | None = None
        self._path: str | None = None
        self._written = threading.Event()
        self._given_up = threading.Event()
        self._all_wrote = threading.Event()
        # Complete or failed; on rank 0 what it supersedes is being removed.
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            name=f"xla_fsdp checkpoint, rank {draft.rank}",
            daemon=False,  # else it is one where the rank's own thread is
        )
        self._thread.start()

    def finish(self) -> str:
        """Agrees with the other ranks on how it went."""
        self._written.wait()
        try:
            self.meeting.together("write its file", self._raise)
            self._all_wrote.set()
            self._over.wait()
            self._path = self.meeting.first("complete the checkpoint", self._result)
        except Exception:
            self._given_up.set()
            self._thread.join()
            self.meeting.gather("stop writing", None)
            self.draft.give_up(self.meeting)
            raise
        return self._path

    def _result(self) -> str | None:
        self._raise()
        return self._path

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def tidied(self) -> None:
        """Returns once what a complete checkpoint supersedes is removed."""
        self._thread.join()

    def over(self) -> bool:
        """Whether :meth:`finish` need not wait for this rank."""
        return self._over.is_set()

    def _run(self) -> None:
        try:
            record = self._write()
            if self.draft.rank == 0:
                self._path = self._complete(record)
        except Exception as error:
            self._fail(error)
        finally:
            self._over.set()
        if self.draft.rank == 0 and self._error is None and self._path is not None:
            self.draft.tidy()
        # What was copied for this save is not needed any more.
        self.draft = replace(self.draft, contents=replace(self.draft.contents, items=[]))

    def _write(self) -> FileRecord:
        try:
            record = self.draft.write()
            self._announce("record", asdict(record))
        except Exception as error:
            self._error = error  # before anybody is told that the writing is over
            raise
        finally:
            self._written.set()
        return record

    def _fail(self, error: Exception) -> None:
        self._error = error
        # The disk may be full: then the next call on this rank says so to all.
        with contextlib.suppress(CheckpointError):
            self._announce("failed", describe(error))

    def _complete(self, own: FileRecord) -> str | None:
        """On rank 0: waits for all files, then makes them a checkpoint."""
        found: dict[int, dict[str, Any]] = {0: asdict(own)}
        wait, alone_since, wrote_since = 0.01, None, None
        while len(found) < self.meeting.size:
            if self._given_up.wait(wait):
                return None
            wait = min(2 * wait, _LONGEST_WAIT)
            self._collect(found)
            if self._all_wrote.is_set():  # what they wrote should be here by now
                wrote_since = wrote_since or time.monotonic()
                late = time.monotonic() > wrote_since + _PATIENCE_ONCE_WRITTEN
                if len(found) < self.meeting.size and late:
                    raise SharedStorageError(
                        f"{self.draft.partial}: other ranks wrote there what rank 0 does not see"
                    )
            if not threading.main_thread().is_alive():  # nobody will call finish any more
                alone_since = alone_since or time.monotonic()
                if time.monotonic() > alone_since + _PATIENCE_AT_EXIT:
                    raise OtherRankError("the program ended, but not all ranks wrote their files")
        self._remove_announcements()
        return self.draft.commit(records([found[rank] for rank in range(self.meeting.size)]))

    def _collect(self, found: dict[int, dict[str, Any]]) -> None:
        store, folder = self.draft.store, self.draft.partial
        names = set(store.list(folder))
        new = [rank for rank in range(self.meeting.size) if rank not in found]
        for rank in new:
            name = _announcement(rank, "failed")
            if name in names:
                said = _read_when_whole(store, join(folder, name))
                raise OtherRankError(f"rank {rank} could not write its file: {said}")
        there = [rank for rank in new if _announcement(rank, "record") in names]
        paths = [join(folder, _announcement(rank, "record")) for rank in there]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            said_by = pool.map(lambda path: _read_when_whole(store, path), paths)
            found.update(zip(there, said_by, strict=True))

    def _announce(self, kind: str, value: Any) -> None:
        if self.draft.rank == 0 or self.meeting.size == 1:
            return
        path = join(self.draft.partial, _announcement(self.draft.rank, kind))
        write(self.draft.store, path, write_json([value]))

    def _remove_announcements(self) -> None:
        store = self.draft.store
        ranks = range(1, self.meeting.size)
        paths = [join(self.draft.partial, _announcement(rank, "record")) for rank in ranks]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(store.remove, paths))


def _announcement(rank: int, kind: str) -> str:
    return f"rank-{rank:05d}.{kind}"


def _read_when_whole(store: Store, path: str) -> Any:
    """What an announcement says; its name may be there before its content."""
    for _ in range(100):
        data = read(store, path, 0, store.size(path))
        if data.endswith(b"]"):
            try:
                return read_json(data, "announcement")[0]
            except CheckpointError:
                pass
        time.sleep(0.05)
    raise OtherRankError("an announcement of another rank cannot be read")
