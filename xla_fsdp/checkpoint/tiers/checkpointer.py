"""``TieredCheckpointer``: saves often into host memory, and sometimes into a durable store.

A job resumes from the newest complete save. A save is complete if the file of every rank is on some
host. Hosts may be missing, new, or have files of an earlier attempt. If a step was saved twice, the
later save is used. If the same bytes are damaged on every host that has them, the next older save
is used. Damage is detected only by reading, so the ranks agree on the save after reading, before
anything is changed.
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

from ...collectives.random_state import synced_device
from ...consolidate.errors import CheckpointError, CheckpointNotFoundError, CorruptFileError
from ...consolidate.format.reader import ShardedCheckpoint
from ...consolidate.format.store import open_store
from ..contents import Contents, list_contents
from ..loading import (
    LoadedCheckpoint,
    Prepared,
    Reader,
    apply_prepared,
    find_checkpoint,
    open_checkpoint,
    prepare,
)
from ..rank_exchange import RankExchange, describe
from ..saving import Request, RunningSave, agree_on_contents, create_folder, validate_request
from .host_tier import Card, HostTier, Save, manifest_of, own_card
from .hosts import Hosts, MultiHostStore, Peer

T = TypeVar("T")

# One save on one host: step, save id, world size, and the ranks whose files the host has.
SaveDescription = tuple[int, str, int, Sequence[int]]
_SHOWN = 8  # maximum number of ranks in a message


class TieredCheckpointer:
    """Saves checkpoints every few steps in host memory, and less often in a durable store.

    Each rank writes its file into a folder in the memory of its host, and sends a copy to the next
    host. Every ``drain_every``-th save is also written to ``path``. All of this is overlapped with
    training: :meth:`save` returns when the rank's values are copied to the host. If a process or
    one host fails, every file is still on some host. :meth:`load` then loads the newest complete
    step, from memory or from ``path``, on any number of ranks. Every byte is compared with its
    digest. Bytes that are damaged on one host are read from the copy, with a warning. ::

        with xla_fsdp.TieredCheckpointer("gs://bucket/run", fast="/dev/shm/run") as tiers:
            loaded = tiers.load(model, optimizer, scheduler, missing_ok=True)
            for step in range(loaded.step if loaded else 0, steps):
                ...
                if step % 10 == 0:
                    tiers.save(model, optimizer, scheduler, step=step)

    Call all methods on every rank. Host memory, per rank: a copy of the rank's shards and buffers
    until they are written, and ``keep_fast + 1`` files of that size; twice as many files with
    copies of another host.

    Args:
        path, keep_last: the durable store, see :func:`save_checkpoint`.
        fast: a folder on a RAM disk of this host. (A local disk also survives a reboot, but is
            slower.) No other job may use it, and hosts must not share one folder.
        keep_fast: number of complete saves to keep in memory, at least 1.
        drain_every: one of this many saves is also written to ``path``; it is skipped if the
            previous one is still being written. 0: only saves with ``durable=True``.
        mirror: send copies to the next host, if there are several hosts.
        host: a name that distinguishes this host from others. Default: its host name and boot id.
        address: an address of this host that other hosts can reach. Default: the address that its
            host name resolves to.

    Raises:
        ValueError, TypeError: an argument is not valid.
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
            raise ValueError(
                f"fast must be a folder of this host, such as /dev/shm/run, got {fast!r}"
            )
        self._tier = HostTier(store, root, os.fsdecode(path).rstrip("/"))
        self.path, self.keep_last = path, keep_last
        self._keep_fast, self._drain_every = keep_fast, drain_every
        with synced_device():
            self._exchange = RankExchange()
            self._exchange.run_and_gather("open the fast tier", lambda: store.make_folder(root))
            self._hosts = Hosts.connect(self._exchange, self._tier, host, address)
            if self._hosts.is_leader:
                self._tier.clean()
            self._exchange.gather_values("begin", None)  # a barrier: write only after the cleaning
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
        """Starts a save and returns when all values are copied to the host.

        Training may change the model after that.

        Args:
            model, optimizer, scheduler, step, extra: see :func:`save_checkpoint`.
            durable: also write this save to ``path``, after waiting for the previous one if it is
                still being written.

        Raises:
            CheckpointError: the previous save failed, and this one was not started; or this one
                cannot start, see :func:`save_checkpoint`. If one rank raises, all ranks do.
        """
        with synced_device() as random:
            exchange = self._exchange
            self._flush()
            request = validate_request(exchange, self.path, step, self.keep_last)
            contents = agree_on_contents(
                exchange, lambda: list_contents(model, optimizer, scheduler, step, extra, random)
            )
            save = Save(step, exchange.run_on_first_rank("name the save", _new_id))
            if self._hosts.is_leader:
                self._remove_later_saves(save)
            contents_on_host = exchange.run_on_each_rank("copy to the host", contents.on_host)
            drained = self._drain(request, contents_on_host, durable)
        self._saved += 1
        self._writing = _Writing(self._tier, save, contents_on_host, exchange.rank, self._partner())
        if drained is not None:
            self._draining = RunningSave(drained, exchange)

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
        """Loads the newest complete step in memory or in ``path``.

        If both have the same step, it is loaded from memory. Arguments and errors are those of
        :func:`load_checkpoint`. A warning lists newer steps that were skipped because a file is on
        no host, or the same bytes are damaged on all hosts. For a save in memory, ``path`` of the
        result is only a name, because its files are on several hosts.

        Raises:
            CorruptFileError: all saves in memory are damaged, and ``path`` has no checkpoint. It is
                also raised with ``missing_ok``.
        """
        exchange = self._exchange

        def read(checkpoint: ShardedCheckpoint) -> Prepared:
            reader = Reader(checkpoint, exchange)
            return prepare(reader, model, optimizer, scheduler, strict, restore_rng)

        with synced_device():
            self._flush()
            prepared = _read_newest(
                self._tier, self._hosts, exchange, self.path, step, missing_ok, read
            )
            if prepared is None:
                return None
            apply_prepared(exchange, prepared)
        prepared.restore_rng()
        return prepared.result

    def wait(self) -> None:
        """Waits until all running saves are complete, in memory and in ``path``.

        Raises:
            CheckpointError: a save failed. Earlier saves are unchanged.
        """
        with synced_device():
            self._flush()
            self._finish_draining()

    def close(self) -> None:
        """Calls :meth:`wait`, then ends the service from which other hosts read files."""
        try:
            self.wait()
            with synced_device():
                self._exchange.gather_values("close the fast tier", None)
        finally:
            self._hosts.close()

    def __enter__(self) -> TieredCheckpointer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not reach a barrier; running saves end on their own
            self._hosts.close()

    def _flush(self) -> None:
        """Waits until the previous save is written on all ranks, then removes older saves."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        self._exchange.run_and_gather("write into the fast tier", writing.finish)
        if self._hosts.is_leader:
            complete = sorted(save for save in self._tier.present() if save <= writing.save)
            self._tier.discard(complete[: -self._keep_fast])

    def _remove_later_saves(self, begun: Save) -> None:
        """Removes saves of later steps: training has gone back to an earlier step, so they must
        not be loaded again."""
        self._tier.discard([save for save in self._tier.present() if save.step > begun.step])

    def _drain(self, request: Request, contents_on_host: Contents, durable: bool) -> Any:
        """Starts to save in ``path`` if this save is due; returns ``None`` otherwise."""
        due = durable or (self._drain_every > 0 and self._saved % self._drain_every == 0)
        if not due:
            return None
        running = self._draining
        if running is not None:
            finished = self._exchange.run_and_gather("drain the last save", running.is_finished)
            if not durable and not all(finished):
                return None
            self._finish_draining()
        opened = self._exchange.run_on_each_rank(
            "open the durable store", lambda: open_store(request.path)
        )
        return create_folder(self._exchange, request, opened, contents_on_host)

    def _finish_draining(self) -> None:
        running, self._draining = self._draining, None
        if running is not None:
            running.finish()
            running.wait_for_removal()

    def _partner(self) -> Peer | None:
        return self._hosts.partner() if self._mirror else None


class _Writing:
    """A save that a thread of this rank writes into host memory."""

    def __init__(
        self,
        tier: HostTier,
        save: Save,
        contents_on_host: Contents,
        rank: int,
        partner: Peer | None,
    ) -> None:
        self.save = save
        known = replace(
            contents_on_host, manifest=replace(contents_on_host.manifest, save_id=save.save_id)
        )
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(tier, known, rank, partner),
            name=f"xla_fsdp tier, rank {rank}",
            daemon=False,  # a process that ends without waiting still finishes its file
        )
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(
        self, tier: HostTier, contents_on_host: Contents, rank: int, partner: Peer | None
    ) -> None:
        try:
            card = tier.write(self.save, contents_on_host, rank)
            if partner is not None:
                partner.put(tier, card)
        except Exception as error:
            self._error = error


def _new_id() -> str:
    """An id that is greater than all earlier ones, so that the last save of a step is found."""
    return f"{time.time_ns():016x}"


def _read_newest(
    tier: HostTier,
    hosts: Hosts,
    exchange: RankExchange,
    path: str | os.PathLike[str],
    step: int | None,
    missing_ok: bool,
    read: Callable[[ShardedCheckpoint], T],
) -> T | None:
    """Returns the result of ``read`` for the newest save that all ranks can read.

    Call it on every rank. Returns ``None`` if there is no save and ``missing_ok`` is true. Rank 0
    warns about skipped saves in memory. ``read`` must not change anything, because it is called
    again for an older save after damage.

    Raises:
        CheckpointNotFoundError: there is no save.
        CorruptFileError: all saves in memory are damaged, and ``path`` has no checkpoint. This is
            raised also with ``missing_ok``: a new training run would remove files that can perhaps
            be repaired.
        CheckpointError: ``read`` raised it on a rank, also for damage in the durable store.
    """
    found = exchange.run_and_gather("list the fast tier", lambda: _list_saves(tier, hosts))
    durable = exchange.run_on_first_rank(
        "find the checkpoint", lambda: find_checkpoint(path, True, step)
    )
    damaged: dict[Save, str] = {}
    while True:
        choice = choose_save([found[rank] for rank in hosts.leaders], step, damaged)
        kept = durable[2] if durable else -1
        newest = max(choice.save.step if choice.save else -1, kept)
        if newest < 0:
            _raise_or_warn_without_save(exchange, tier, path, choice, damaged, missing_ok)
            return None
        values: list[T] = []
        if choice.save is None or choice.save.step < newest:
            _warn_about_skipped_saves(exchange, choice, newest, damaged)
            return exchange.run_on_each_rank(
                "read the checkpoint", lambda: read(open_checkpoint(durable))
            )
        store = _open_chosen_save(tier, hosts, exchange, choice)

        def attempt(store: MultiHostStore = store, values: list[T] = values) -> str | None:
            try:
                values.append(read(ShardedCheckpoint(store.folder, store)))
            except CorruptFileError as error:
                return describe(error)
            return None

        wrong = exchange.run_and_gather("read the checkpoint", attempt)
        if not any(wrong):
            _warn_about_skipped_saves(exchange, choice, newest, damaged)
            return values[0]
        rank = next(rank for rank, text in enumerate(wrong) if text)
        damaged[choice.save] = f"step {newest}: damaged on every host that has it: {wrong[rank]}"


def _list_saves(tier: HostTier, hosts: Hosts) -> list:
    if not hosts.is_leader:
        return []
    saves = (describe_save(tier.cards(save)) for save in tier.saves())
    return [found for found in saves if found is not None]


def _open_chosen_save(
    tier: HostTier, hosts: Hosts, exchange: RankExchange, choice: SaveChoice
) -> MultiHostStore:
    """A store with the chosen save, from which this rank can read."""
    assert choice.save is not None

    def read_own_cards() -> list[str]:
        if not hosts.is_leader:
            return []
        cards = tier.cards(choice.save)  # type: ignore[arg-type]
        own = [rank for rank, numbers in choice.hosts_by_rank.items() if numbers[0] == hosts.number]
        return [card.without_manifest().dump().decode() for card in cards if card.rank in own]

    gathered = exchange.run_and_gather("exchange the cards of the chosen save", read_own_cards)
    cards = {
        card.rank: card
        for texts in gathered
        for card in (Card.load(text.encode(), "another host") for text in texts)
    }

    def copies_of(rank: int) -> list[Peer | None]:
        numbers = sorted(choice.hosts_by_rank[rank], key=lambda host: host != hosts.number)
        return [None if one == hosts.number else hosts.peers[one] for one in numbers]

    def with_manifest() -> Card:
        for peer in copies_of(0):
            try:
                if peer is None:
                    return own_card(tier, cards[0])
                return peer.manifest(cards[0])
            except CheckpointError as error:
                failed = error
        raise failed

    # The manifest is read separately: a gather pads the values of all ranks to the longest one.
    cards[0] = exchange.run_on_each_rank("read the manifest", with_manifest)
    return MultiHostStore(tier, cards, manifest_of(cards), copies_of)


def _raise_or_warn_without_save(
    exchange: RankExchange,
    tier: HostTier,
    path: str | os.PathLike[str],
    choice: SaveChoice,
    damaged: Mapping[Save, str],
    missing_ok: bool,
) -> None:
    skipped = "; ".join(choice.skipped.values()) or f"there is no save of this run in {tier.root}"
    where = os.fsdecode(path)
    if damaged:
        raise CorruptFileError(
            f"{where}: has no checkpoint, and {skipped}. Check the memory of the hosts. To start "
            f"a new run, remove {tier.root} on all hosts."
        )
    if not missing_ok:
        raise CheckpointNotFoundError(f"{where}: has no checkpoint, and {skipped}")
    _warn_about_skipped_saves(exchange, choice, -1, damaged)


def _warn_about_skipped_saves(
    exchange: RankExchange, choice: SaveChoice, newest: int, damaged: Mapping[Save, str]
) -> None:
    if exchange.rank:
        return
    loaded = f"step {newest} is the newest complete step" if newest >= 0 else "no step is complete"
    by_step: dict[int, Any] = {save.step: text for save, text in damaged.items()}
    for step, text in {**choice.skipped, **by_step}.items():
        if step > newest or step in by_step:
            warnings.warn(f"{text}; {loaded}", stacklevel=4)


@dataclass(frozen=True)
class SaveChoice:
    """The newest complete save in memory.

    Attributes:
        save: the save, ``None`` if none is complete.
        world_size: the number of ranks that saved it.
        hosts_by_rank: for each rank, the hosts that have its file.
        skipped: for each newer step that was skipped, the reason.
    """

    save: Save | None
    world_size: int
    hosts_by_rank: Mapping[int, Sequence[int]]
    skipped: Mapping[int, str]


def describe_save(cards: Iterable[Card]) -> SaveDescription | None:
    """What a host reports about one save, from its cards. ``None`` without cards."""
    cards = list(cards)
    if not cards:
        return None
    first = cards[0]
    # All files of one save have the same world size, because each save has a new id.
    ranks = [card.rank for card in cards if card.world_size == first.world_size]
    return first.save.step, first.save.save_id, first.world_size, ranks


def choose_save(
    hosts: Sequence[Sequence[SaveDescription]],
    step: int | None = None,
    damaged: Mapping[Save, str] = MappingProxyType({}),
) -> SaveChoice:
    """Chooses the newest save of which ``hosts`` together have all files.

    Args:
        hosts: for each host, its saves.
        step: if given, only saves of this step.
        damaged: saves to skip, each with the reason.
    """
    found: dict[tuple[Save, int], dict[int, list[int]]] = {}
    for host, saves in enumerate(hosts):
        for number, save_id, world, ranks in saves:
            if step in (None, number):
                hosts_by_rank = found.setdefault((Save(number, save_id), world), {})
                for rank in ranks:
                    hosts_by_rank.setdefault(rank, []).append(host)
    skipped: dict[int, str] = {}
    for (save, world), hosts_by_rank in sorted(found.items(), reverse=True):
        missing = [rank for rank in range(world) if rank not in hosts_by_rank]
        if save in damaged:
            skipped.setdefault(save.step, damaged[save])
            continue
        if not missing:
            return SaveChoice(save, world, hosts_by_rank, skipped)
        shown = ", ".join(map(str, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
        text = f"step {save.step}: no host has the files of ranks {shown} (of {world})"
        skipped.setdefault(save.step, text)
    return SaveChoice(None, 0, {}, skipped)
