"""``TieredCheckpointer``: saves often into host memory, and sometimes into a durable store.

Damage is detected only by reading, so ranks agree on the save to load after reading.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from ...collectives.random_state import synced_device
from ...consolidate.errors import CheckpointError, CheckpointNotFoundError, CorruptFileError
from ...consolidate.format.digests import digest
from ...consolidate.format.reader import ShardedCheckpoint
from ...consolidate.format.store import open_store, path_text
from ..contents import Contents
from ..loading import (
    LoadedCheckpoint,
    PreparedLoad,
    Reader,
    find_checkpoint,
    open_checkpoint,
    prepare_load,
)
from ..rank_exchange import RankExchange, describe_error
from ..saving import (
    IncompleteSave,
    RunningSave,
    agree_on_contents,
    begin_save,
    require_keep_last,
)
from .host_tier import Card, HostTier, Save
from .hosts import Hosts, MultiHostStore, Peer

# Step, save id, world size, and the ranks whose files the host has.
SaveDescription = tuple[int, str, int, Sequence[int]]
_SHOWN = 8  # ranks in a message


class TieredCheckpointer:
    """Saves checkpoints every few steps in host memory, and less often in a durable store.

    Each rank writes its file into a folder in the memory of its host, and sends a copy to the next
    host, overlapped with training. If one host fails, :meth:`load` loads the newest complete step,
    from memory or from ``path``, on any number of ranks. Bytes that are damaged on one host are
    read from the copy, with a warning.

    Call all methods on every rank. As a context manager, it calls :meth:`close`. Host memory, per
    rank: a copy of the rank's shards and buffers until they are written, and ``keep_fast + 1``
    files of that size; twice as many files with ``mirror``.

    Args:
        path, keep_last: the durable store, see :func:`save_checkpoint`.
        fast: a folder on a RAM disk of this host (or a local disk, which is slower). Hosts must
            not share one folder. In it each ``path`` has a folder ``run-*``.
        keep_fast: number of complete saves to keep in memory, at least 1.
        drain_every: one of this many saves is also written to ``path``, unless the previous one is
            still being written. 0: only saves with ``durable=True``.
        mirror: send copies to the next host, if there are several hosts.
        host: a name that distinguishes this host from others. Default: its host name and boot id.
        address: an address of this host that other hosts can reach. Default: that of its host name.

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
        require_keep_last(keep_last)
        store, root = open_store(fast, "fast")
        if not store.renames:
            raise ValueError(
                f"fast must be a folder of this host, such as /dev/shm/run, got {fast!r}"
            )
        run = digest(path_text(path).rstrip("/").encode())
        # Absolute, because threads use it after a chdir.
        root = os.path.join(os.path.abspath(root), f"run-{run}")
        self._tier = HostTier(store, root, run)
        self.path, self.keep_last = path, keep_last
        self._keep_fast, self._drain_every = keep_fast, drain_every
        with synced_device():
            self._exchange = RankExchange()
            self._exchange.run_and_gather("open the fast tier", lambda: store.make_folder(root))
            self._hosts = Hosts(self._exchange, self._tier, host, address)
            if self._hosts.is_leader:
                self._tier.clean()
            self._exchange.gather_values("begin", None)  # write only after the cleaning
        self._mirror = mirror and len(self._hosts.peers) > 1
        # Not daemon threads: a process that ends without waiting finishes its file.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="xla_fsdp tier")
        self._writing: tuple[Save, Future[None]] | None = None
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
        """Starts a save. When it returns, all values are copied and training may change the model.

        Args:
            model, optimizer, scheduler, step, extra: see :func:`save_checkpoint`.
            durable: also write this save to ``path``, after waiting for the previous one.

        Raises:
            CheckpointError: the previous save failed, and this one was not started; or this one
                cannot start.
        """
        with synced_device() as random:
            exchange = self._exchange
            self._flush()
            state = model, optimizer, scheduler, step, extra
            contents = agree_on_contents(exchange, random, self.keep_last, *state)
            save_id = exchange.run_on_first_rank("name the save", lambda: f"{time.time_ns():016x}")
            save = Save(step, save_id)
            if self._hosts.is_leader:
                # If training went back to an earlier step, later saves must not be loaded again.
                self._tier.discard([old for old in self._tier.present() if old > save])
            contents_on_host = exchange.run_on_each_rank("copy to the host", contents.on_host)
            drained = self._drain(contents_on_host, durable)
        self._saved += 1
        named = replace(contents_on_host.manifest, save_id=save_id)
        contents = replace(contents_on_host, manifest=named)
        self._writing = save, self._writer.submit(self._write, save, contents)
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
        """Loads the newest complete step in memory or in ``path``; from memory if both have it.

        Arguments and errors are those of :func:`load_checkpoint`. A warning lists newer steps that
        were skipped because a file is missing or damaged on all hosts. For a save in memory,
        ``path`` of the result is only a name, because its files are on several hosts.

        Raises:
            CorruptFileError: all saves in memory are damaged, and ``path`` has no checkpoint. It is
                also raised with ``missing_ok``.
        """
        exchange = self._exchange

        def read(checkpoint: ShardedCheckpoint, path: str) -> PreparedLoad:
            reader = Reader(checkpoint, exchange, path)
            return prepare_load(reader, model, optimizer, scheduler, strict, restore_rng)

        with synced_device():
            self._flush()
            prepared = self._read_newest(step, missing_ok, read)
            if prepared is None:
                return None
            prepared.apply(exchange)
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
            self._end_threads()

    def __enter__(self) -> TieredCheckpointer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not reach a barrier
            self._end_threads()

    def _end_threads(self) -> None:
        self._writer.shutdown(wait=False)
        self._hosts.close()

    def _write(self, save: Save, contents: Contents) -> None:
        card = self._tier.write(save, contents, self._exchange.rank)
        if self._mirror:
            self._hosts.partner.put(self._tier, card)

    def _flush(self) -> None:
        """Waits until the previous save is written on all ranks, then removes older saves."""
        if self._writing is None:
            return
        (save, written), self._writing = self._writing, None
        self._exchange.run_and_gather("write into the fast tier", written.result)
        if self._hosts.is_leader:
            complete = sorted(old for old in self._tier.present() if old <= save)
            self._tier.discard(complete[: -self._keep_fast])

    def _drain(self, contents_on_host: Contents, durable: bool) -> IncompleteSave | None:
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
        return begin_save(self._exchange, self.path, self.keep_last, contents_on_host)

    def _finish_draining(self) -> None:
        running, self._draining = self._draining, None
        if running is not None:
            running.finish()

    def _read_newest(
        self,
        step: int | None,
        missing_ok: bool,
        read: Callable[[ShardedCheckpoint, str], PreparedLoad],
    ) -> PreparedLoad | None:
        """Returns the result of ``read`` for the newest save that all ranks can read, or ``None``.

        ``read`` must not change anything: after damage, it is called again for an older save.
        """
        exchange = self._exchange
        found = exchange.run_and_gather("list the fast tier", self._list_saves)
        durable = exchange.run_on_first_rank(
            "find the checkpoint", lambda: find_checkpoint(self.path, True, step)
        )
        kept = durable[2] if durable else -1
        damaged: dict[Save, str] = {}

        def try_to_read(store: MultiHostStore) -> tuple[PreparedLoad | None, str | None]:
            try:
                checkpoint = ShardedCheckpoint(store.folder, store, store.manifest())
                return read(checkpoint, store.folder), None
            except CorruptFileError as error:
                return None, describe_error(error)

        while True:
            choice = choose_save([found[rank] for rank in self._hosts.leaders], step, damaged)
            if choice.save is None or choice.save.step < kept:
                break
            store = self._open_chosen_save(choice)
            prepared, damage = exchange.run("read the checkpoint", partial(try_to_read, store))
            if not any(damage):
                self._warn_about_skipped_saves(choice, choice.save.step, damaged)
                return prepared
            rank = next(rank for rank, text in enumerate(damage) if text)
            damaged[choice.save] = (
                f"step {choice.save.step}: damaged on every host that has it: {damage[rank]}"
            )
        if durable is None:
            self._raise_if_damaged_or_missing(choice, damaged, missing_ok)
        self._warn_about_skipped_saves(choice, kept, damaged)
        if durable is None:
            return None
        return exchange.run_on_each_rank(
            "read the checkpoint", lambda: read(open_checkpoint(durable), durable[0])
        )

    def _list_saves(self) -> list[SaveDescription]:
        if not self._hosts.is_leader:
            return []
        saves = (describe_save(self._tier.cards(save)) for save in self._tier.saves())
        return [found for found in saves if found is not None]

    def _open_chosen_save(self, choice: SaveChoice) -> MultiHostStore:
        tier, hosts, save = self._tier, self._hosts, choice.save
        assert save is not None

        def read_own_cards() -> list[str]:
            if not hosts.is_leader:
                return []
            own = [rank for rank, on in choice.hosts_by_rank.items() if on[0] == hosts.number]
            cards = [card for card in tier.cards(save) if card.rank in own]
            return [card.without_manifest().dump().decode() for card in cards]

        gathered = self._exchange.run_and_gather(
            "exchange the cards of the chosen save", read_own_cards
        )
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
                    return tier.card(cards[0]) if peer is None else peer.card(cards[0])
                except CheckpointError as error:
                    failed = error
            raise failed

        # Read separately: a gather pads the values of all ranks to the longest one.
        cards[0] = self._exchange.run_on_each_rank("read the manifest", with_manifest)
        return MultiHostStore(tier, cards, copies_of)

    def _raise_if_damaged_or_missing(
        self, choice: SaveChoice, damaged: Mapping[Save, str], missing_ok: bool
    ) -> None:
        """Raises for damage also with ``missing_ok``: a new run would remove repairable files."""
        root, where = self._tier.root, os.fsdecode(self.path)
        skipped = "; ".join(choice.skipped.values()) or f"there is no save of this run in {root}"
        if damaged:
            raise CorruptFileError(
                f"{where}: has no checkpoint, and {skipped}. Check the memory of the hosts. To "
                f"start a new run, remove {root} on all hosts."
            )
        if not missing_ok:
            raise CheckpointNotFoundError(f"{where}: has no checkpoint, and {skipped}")

    def _warn_about_skipped_saves(
        self, choice: SaveChoice, newest: int, damaged: Mapping[Save, str]
    ) -> None:
        if self._exchange.rank:
            return
        loaded = f"step {newest} is the newest complete step"
        by_step = {save.step: text for save, text in damaged.items()}
        for step, text in {**choice.skipped, **by_step}.items():
            if step > newest or step in by_step:
                warnings.warn(
                    f"{text}; {loaded if newest >= 0 else 'no step is complete'}", stacklevel=4
                )


@dataclass(frozen=True)
class SaveChoice:
    """The newest complete save in memory, or ``None``.

    ``hosts_by_rank``: the hosts with its file. ``skipped``: by newer step, the reason to skip it.
    """

    save: Save | None
    hosts_by_rank: Mapping[int, Sequence[int]]
    skipped: Mapping[int, str]


def describe_save(cards: Sequence[Card]) -> SaveDescription | None:
    if not cards:
        return None
    first = cards[0]
    # Each save has a new id, so all its files have the same world size.
    ranks = [card.rank for card in cards if card.world_size == first.world_size]
    return first.save.step, first.save.save_id, first.world_size, ranks


def choose_save(
    hosts: Sequence[Sequence[SaveDescription]],
    step: int | None = None,
    damaged: Mapping[Save, str] = MappingProxyType({}),
) -> SaveChoice:
    """Chooses the newest save of which ``hosts`` together have all files.

    ``hosts``: the saves of each host. ``damaged``: saves to skip, with the reason.
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
            return SaveChoice(save, hosts_by_rank, skipped)
        shown = ", ".join(map(str, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
        text = f"step {save.step}: no host has the files of ranks {shown} (of {world})"
        skipped.setdefault(save.step, text)
    return SaveChoice(None, {}, skipped)
