"""Which save a job goes on from, of those in the hosts' memory and in the durable store.

The newest one that all hosts together have whole; and if bytes of it turn out to be damaged on
every host that has them, the newest one that is older. What is damaged is only known once it is
read, so ranks agree after reading, before anything is changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...consolidate.errors import CheckpointError, CheckpointNotFoundError, CorruptFileError
from ...consolidate.format.reader import ShardedCheckpoint
from ..loading import find, open_found
from ..meeting import Meeting, describe
from .choosing import Choice, choose, listed
from .holding import Card, HostTier, Save, manifest_of, own_card
from .hosts import Hosts
from .spread import SpreadStore
from .wire import Peer

T = TypeVar("T")


def read_newest(
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
