"""``TieredCheckpointer``: often into the hosts' memory, now and then into the durable store."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

from torch import nn

from ...collectives.random_state import at_rest
from ...consolidate.format.reader import ShardedCheckpoint
from ...consolidate.format.store import open_store
from ..asynchronous import RunningSave
from ..contents import Contents, take_contents
from ..draft import Request, agreed, place
from ..loading import take_effect
from ..meeting import Meeting
from ..reading import LoadedCheckpoint, Prepared, Reader, prepare
from ..saving import meeting_request
from .holding import HostTier, Save
from .hosts import Hosts
from .newest import read_newest
from .wire import Peer


class TieredCheckpointer:
    """Checkpoints every few steps in the memory of the hosts, and in a durable store behind them.

    Each rank writes its file into a folder of its own host's memory, sends a copy to the next host,
    and every so often the same goes on to ``path``, all beside training: ``save`` returns once what
    the rank holds is copied. A process may die, or one host: every file is still on some host, and
    :meth:`load` takes the newest step that is whole, from memory or from ``path``, on any number of
    ranks. Every byte is compared with its digest, wherever it is from; what is damaged in one
    host's memory is read from the copy, with a warning. ::

        with xla_fsdp.TieredCheckpointer("gs://bucket/run", fast="/dev/shm/run") as tiers:
            loaded = tiers.load(model, optimizer, scheduler, missing_ok=True)
            for step in range(loaded.step if loaded else 0, steps):
                ...
                if step % 10 == 0:
                    tiers.save(model, optimizer, scheduler, step=step)

    All methods must be called on every rank. Memory on the host: a copy of what each rank holds,
    until it is written; and ``keep_fast + 1`` times that, twice if it is copied to another host.

    Args:
        path, keep_last: the durable store, as for :func:`save_checkpoint`.
        fast: a folder on a RAM disk of this host (a local disk survives more, and is slower). Only
            this job uses it. Not shared by hosts, unless each has another.
        keep_fast: whole saves kept in memory, at least 1.
        drain_every: of so many saves one goes on to ``path``, and is skipped if the last one is not
            over; 0: only those with ``durable=True``.
        mirror: send copies to the next host, if there are several.
        host: what tells this host from others. Default: its name and the id of its boot.
        address: the one of this host that others reach. Default: what its name resolves to.

    Raises:
        ValueError, TypeError: wrong arguments.
        OutputError, OtherRankError: ``fast`` cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        fast: str | os.PathLike,
        keep_last: int | None = None,
        keep_fast: int = 1,
        drain_every: int = 10,
        mirror: bool = True,
        host: str | None = None,
        address: str | None = None,
    ) -> None:
        for name, value, least in (("keep_fast", keep_fast, 1), ("drain_every", drain_every, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        store, root = open_store(fast, "fast")
        if not store.renames:
            raise ValueError(f"fast must be a folder of this host, such as /dev/shm/run: {fast!r}")
        self._tier = HostTier(store, root, os.fsdecode(path).rstrip("/"))
        self.path, self.keep_last = path, keep_last
        self._keep_fast, self._drain_every = keep_fast, drain_every
        with at_rest():
            self._meeting = Meeting()
            self._meeting.together("open the fast tier", lambda: store.make_folder(root))
            self._hosts = Hosts.meet(self._meeting, self._tier, host, address)
            if self._hosts.leads:
                self._tier.clean()
            self._meeting.gather("begin", None)  # nobody writes before all is clean
        self._mirror = mirror and len(self._hosts.peers) > 1
        self._writing: _Writing | None = None
        self._draining: RunningSave | None = None
        self._saved = 0

    def save(
        self,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        step: int,
        extra: Any = None,
        durable: bool = False,
    ) -> None:
        """Begins to save; returns when everything is copied, so that training may change it.

        ``durable``: this one goes to ``path`` for certain, if need be after waiting for the last.

        Raises:
            CheckpointError: the save before this one failed (this one is not begun), or this one
                cannot begin; see :func:`save_checkpoint`. If one rank raises, all do.
        """
        with at_rest() as random:
            meeting = self._meeting
            self._settle()
            request = meeting_request(meeting, self.path, step, self.keep_last)
            contents = agreed(
                meeting, lambda: take_contents(model, optimizer, scheduler, step, extra, random)
            )
            save = Save(step, meeting.first("name the save", _new_id))
            if self._hosts.leads:
                self._forget(save)
            held = meeting.each("copy to the host", contents.on_host)
            drained = self._drain(request, held, durable)
        self._saved += 1
        self._writing = _Writing(self._tier, save, held, meeting.rank, self._partner())
        if drained is not None:
            self._draining = RunningSave(drained, meeting)

    def load(
        self,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        strict: bool = True,
        restore_rng: bool = True,
        missing_ok: bool = False,
        step: int | None = None,
    ) -> LoadedCheckpoint | None:
        """Loads the newest step that is whole in memory or in ``path``; of equal ones that in
        memory. Arguments and errors: :func:`load_checkpoint`. Later steps that are passed over,
        since no host has all files of them, or the same bytes are damaged on all, are warned of.
        ``path`` of the result is a name: what is in memory lies in several places.

        Raises:
            CorruptFileError: all that is in memory is damaged, and ``path`` has nothing; also with
                ``missing_ok``.
        """
        meeting = self._meeting

        def read(checkpoint: ShardedCheckpoint) -> Prepared:
            reader = Reader(checkpoint, meeting)
            return prepare(reader, model, optimizer, scheduler, strict, restore_rng)

        with at_rest():
            self._settle()
            prepared = read_newest(
                self._tier, self._hosts, meeting, self.path, step, missing_ok, read
            )
            if prepared is None:
                return None
            take_effect(meeting, prepared)
        prepared.restore_rng()
        return prepared.result

    def wait(self) -> None:
        """Returns once all that was begun is over, in memory and in ``path``.

        Raises:
            CheckpointError: something could not be saved. Earlier saves are as they were.
        """
        with at_rest():
            self._settle()
            self._finish_draining()

    def close(self) -> None:
        """:meth:`wait`; then other hosts cannot read here any more."""
        try:
            self.wait()
            with at_rest():
                self._meeting.gather("close the fast tier", None)
        finally:
            self._hosts.close()

    def __enter__(self) -> TieredCheckpointer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may be anywhere: what is under way ends by itself
            self._hosts.close()

    def _settle(self) -> None:
        """Ends the writing of the last save, on all ranks; then older ones may go."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        self._meeting.together("write into the fast tier", writing.finish)
        if self._hosts.leads:
            whole = sorted(save for save in self._tier.present() if save <= writing.save)
            self._tier.discard(whole[: -self._keep_fast])

    def _forget(self, begun: Save) -> None:
        """Saves of later steps are of a way that training has left: they must not come back."""
        self._tier.discard([save for save in self._tier.present() if save.step > begun.step])

    def _drain(self, request: Request, held: Contents, durable: bool) -> Any:
        """A draft in ``path`` for what is to go there, if it is this one's turn."""
        due = durable or (self._drain_every > 0 and self._saved % self._drain_every == 0)
        if not due:
            return None
        running = self._draining
        if running is not None:
            over = self._meeting.together("drain the last save", running.over)
            if not durable and not all(over):
                return None
            self._finish_draining()
        opened = self._meeting.each("open the durable store", lambda: open_store(request.path))
        return place(self._meeting, request, opened, held)

    def _finish_draining(self) -> None:
        running, self._draining = self._draining, None
        if running is not None:
            running.finish()
            running.tidied()

    def _partner(self) -> Peer | None:
        return self._hosts.partner() if self._mirror else None


class _Writing:
    """A save on its way into memory, by a thread of this rank."""

    def __init__(
        self, tier: HostTier, save: Save, held: Contents, rank: int, partner: Peer | None
    ) -> None:
        self.save = save
        known = replace(held, manifest=replace(held.manifest, save_id=save.save_id))
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(tier, known, rank, partner),
            name=f"xla_fsdp tier, rank {rank}",
            daemon=False,  # a process that ends without waiting still completes what it can
        )
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, tier: HostTier, held: Contents, rank: int, partner: Peer | None) -> None:
        try:
            card = tier.write(self.save, held, rank)
            if partner is not None:
                partner.put(tier, card)
        except Exception as error:
            self._error = error


def _new_id() -> str:
    """Later ones are greater: of one step the one that was saved last is wanted."""
    return f"{time.time_ns():016x}"
