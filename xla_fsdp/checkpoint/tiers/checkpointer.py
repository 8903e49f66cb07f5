"""``TieredCheckpointer``: often into the hosts' memory, now and then into the durable store.

A job goes on from the newest save that all hosts together have whole: every rank's file is on some
host, whichever. Hosts that are gone, new, or left from an earlier attempt change nothing but what
there is; of one step saved twice the later one counts. If bytes of it turn out to be damaged on
every host that has them, it is the newest one that is older. What is damaged is only known once it
is read, so ranks agree after reading, before anything is changed.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from ...collectives.random_state import at_rest
from ...consolidate.errors import CheckpointError, CheckpointNotFoundError, CorruptFileError
from ...consolidate.format.reader import ShardedCheckpoint
from ...consolidate.format.store import open_store
from ..asynchronous import RunningSave
from ..contents import Contents, take_contents
from ..draft import Request, agreed, place
from ..loading import find, open_found, take_effect
from ..meeting import Meeting, describe
from ..reading import LoadedCheckpoint, Prepared, Reader, prepare
from ..saving import meeting_request
from .holding import Card, HostTier, Save, manifest_of, own_card
from .hosts import Hosts, Peer, SpreadStore

T = TypeVar("T")

# Of one host: step, save id, world size, ranks whose files are there.
Listed = tuple[int, str, int, Sequence[int]]
_SHOWN = 8  # ranks in a message


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
            prepared = _read_newest(
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


def _read_newest(
    tier: HostTier,
    hosts: Hosts,
    meeting: Meeting,
    path: str | os.PathLike[str],
    step: int | None,
    missing_ok: bool,
    read: Callable[[ShardedCheckpoint], T],
) -> T | None:
    """What ``read`` makes of the newest save that all ranks can read; call on every rank.

    ``None``: there is none, and that is allowed (``missing_ok``). Saves in memory that are passed
    over are warned of on rank 0. ``read`` changes nothing, and may be called again for another.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptFileError: all that there is in memory is damaged, and ``path`` has none, whether or
            not that is allowed: training that began anew would remove what can perhaps be saved.
        CheckpointError: what ``read`` raises on any rank, of the durable store damage as well.
    """
    found = meeting.together("list the fast tier", lambda: _listed(tier, hosts))
    durable = meeting.first("find the checkpoint", lambda: find(path, True, step))
    damaged: dict[Save, str] = {}
    while True:
        choice = choose([found[rank] for rank in hosts.leaders], step, damaged)
        kept = durable[2] if durable else -1
        newest = max(choice.save.step if choice.save else -1, kept)
        if newest < 0:
            _nothing(meeting, tier, path, choice, damaged, missing_ok)
            return None
        values: list[T] = []
        if choice.save is None or choice.save.step < newest:
            _warn_of(meeting, choice, newest, damaged)
            return meeting.each("read the checkpoint", lambda: read(open_found(durable)))
        whole = _spread(tier, hosts, meeting, choice)

        def attempt(whole: SpreadStore = whole, values: list[T] = values) -> str | None:
            try:
                values.append(read(ShardedCheckpoint(whole.folder, whole)))
            except CorruptFileError as error:
                return describe(error)
            return None

        wrong = meeting.together("read the checkpoint", attempt)
        if not any(wrong):
            _warn_of(meeting, choice, newest, damaged)
            return values[0]
        rank = next(rank for rank, text in enumerate(wrong) if text)
        damaged[choice.save] = f"step {newest}: damaged wherever it is: {wrong[rank]}"


def _listed(tier: HostTier, hosts: Hosts) -> list:
    if not hosts.leads:
        return []
    saves = (listed(tier.cards(save)) for save in tier.saves())
    return [found for found in saves if found is not None]


def _spread(tier: HostTier, hosts: Hosts, meeting: Meeting, choice: Choice) -> SpreadStore:
    """The chosen save, to be read on this rank."""
    assert choice.save is not None

    def held() -> list[str]:
        if not hosts.leads:
            return []
        cards = tier.cards(choice.save)  # type: ignore[arg-type]
        own = [rank for rank, holders in choice.holders.items() if holders[0] == hosts.number]
        return [card.bare().dump().decode() for card in cards if card.rank in own]

    told = meeting.together("tell of the chosen save", held)
    cards = {
        card.rank: card
        for texts in told
        for card in (Card.load(text.encode(), "another host") for text in texts)
    }

    def copies_of(rank: int) -> list[Peer | None]:
        holders = sorted(choice.holders[rank], key=lambda host: host != hosts.number)
        return [None if one == hosts.number else hosts.peers[one] for one in holders]

    def with_manifest() -> Card:
        for peer in copies_of(0):
            try:
                if peer is None:
                    return own_card(tier, cards[0])
                return peer.manifest(cards[0])
            except CheckpointError as error:
                failed = error
        raise failed

    # What all ranks tell each other is as long as the longest of it, for each of them.
    cards[0] = meeting.each("read the manifest", with_manifest)
    return SpreadStore(tier, cards, manifest_of(cards), copies_of)


def _nothing(
    meeting: Meeting,
    tier: HostTier,
    path: str | os.PathLike[str],
    choice: Choice,
    damaged: Mapping[Save, str],
    missing_ok: bool,
) -> None:
    passed = "; ".join(choice.passed.values()) or f"nothing of this run in {tier.root}"
    where = os.fsdecode(path)
    if damaged:
        raise CorruptFileError(
            f"{where}: has none, and {passed}; look at the memory of the hosts, and to begin anew "
            f"remove {tier.root} on all of them"
        )
    if not missing_ok:
        raise CheckpointNotFoundError(f"{where}: has none, and {passed}")
    _warn_of(meeting, choice, -1, damaged)


def _warn_of(meeting: Meeting, choice: Choice, newest: int, damaged: Mapping[Save, str]) -> None:
    if meeting.rank:
        return
    goes = f"step {newest} is the newest that is whole" if newest >= 0 else "none is whole"
    told: dict[int, Any] = {save.step: text for save, text in damaged.items()}
    for step, text in {**choice.passed, **told}.items():
        if step > newest or step in told:
            warnings.warn(f"{text}; {goes}", stacklevel=4)


@dataclass(frozen=True)
class Choice:
    """``save`` of ``world_size`` ranks, ``None`` if none is whole; ``holders``: for each rank the
    hosts that have its file; ``passed``: by step, a clause for each later save that is not whole.
    """

    save: Save | None
    world_size: int
    holders: Mapping[int, Sequence[int]]
    passed: Mapping[int, str]


def listed(cards: Iterable[Card]) -> Listed | None:
    """What a host tells of one save."""
    cards = list(cards)
    if not cards:
        return None
    first = cards[0]
    # Files of two worlds cannot be of one save: ids are drawn anew for each.
    ranks = [card.rank for card in cards if card.world_size == first.world_size]
    return first.save.step, first.save.save_id, first.world_size, ranks


def choose(
    hosts: Sequence[Sequence[Listed]],
    step: int | None = None,
    damaged: Mapping[Save, str] = MappingProxyType({}),
) -> Choice:
    """The newest save that ``hosts`` have whole among them; with ``step``, of that step.

    ``damaged``: saves that are not to be chosen, with a clause why."""
    found: dict[tuple[Save, int], dict[int, list[int]]] = {}
    for host, saves in enumerate(hosts):
        for number, save_id, world, ranks in saves:
            if step in (None, number):
                holders = found.setdefault((Save(number, save_id), world), {})
                for rank in ranks:
                    holders.setdefault(rank, []).append(host)
    passed: dict[int, str] = {}
    for (save, world), holders in sorted(found.items(), reverse=True):
        missing = [rank for rank in range(world) if rank not in holders]
        if save in damaged:
            passed.setdefault(save.step, damaged[save])
            continue
        if not missing:
            return Choice(save, world, holders, passed)
        shown = ", ".join(map(str, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
        text = f"step {save.step}: no host has the files of ranks {shown} (of {world})"
        passed.setdefault(save.step, text)
    return Choice(None, 0, {}, passed)
