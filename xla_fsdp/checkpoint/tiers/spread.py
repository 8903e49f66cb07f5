"""One save as a checkpoint to read, its files on whichever hosts they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ...consolidate.errors import CheckpointError, CheckpointNotFoundError
from ...consolidate.format import manifest
from ...consolidate.format.digests import digest
from ...consolidate.format.store import Output, join
from .holding import Card, HostTier
from .wire import Peer


class SpreadStore:
    """A store (see :class:`~..consolidate.format.store.Store`) with one folder to read.

    ``cards``: of all ranks' files; ``copies_of``: who has a rank's file, in the order in which to
    ask, ``None`` for this host. A chunk that is damaged on one is read from the next, with a
    warning. Of the last the caller compares every byte with the digests of the manifest, as it does
    of all.
    """

    renames = True

    def __init__(
        self,
        tier: HostTier,
        cards: Mapping[int, Card],
        whole: bytes,
        copies_of: Callable[[int], Sequence[Peer | None]],
    ) -> None:
        first = cards[0]
        self.folder = join(tier.root, f"step-{first.save.step:08d}")
        self._tier, self._manifest = tier, whole
        self._cards = {card.name: card for card in cards.values()}
        self._copies = {rank: list(copies_of(rank)) for rank in cards}

    def size(self, path: str) -> int:
        name = self._name(path)
        return len(self._manifest) if name == manifest.NAME else self._card(path).record.size

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        if self._name(path) == manifest.NAME:
            out[:] = self._manifest[begin : begin + len(out)]
            return
        card = self._card(path)
        *others, last = self._copies[card.rank]
        for peer in others:
            try:
                self._read(card, peer, begin, out)
                if self._right(card, begin, out):
                    return
                wrong = f"bytes {begin} to {begin + len(out)} are not those that were saved"
            except CheckpointError as error:
                wrong = str(error)
            self._put_last(card, peer, wrong)
        self._read(card, last, begin, out)

    def _read(self, card: Card, peer: Peer | None, begin: int, out: memoryview) -> None:
        if peer is None:
            own = join(self._tier.folder(card.save), card.name)
            self._tier.store.read_into(own, begin, out)
        else:
            peer.read_into(card, begin, out)

    @staticmethod
    def _right(card: Card, begin: int, out: memoryview) -> bool:
        # Readers read whole chunks, which alone have digests.
        number, inside = divmod(begin, card.record.chunk)
        length = min(card.record.chunk, card.record.size - begin)
        return inside == 0 and len(out) == length and digest(out) == card.record.digests[number]

    def _put_last(self, card: Card, peer: Peer | None, wrong: str) -> None:
        """A host that hangs or has bad memory is not asked for each chunk again."""
        copies = [other for other in self._copies[card.rank] if other is not peer]
        self._copies[card.rank] = [*copies, peer]
        warnings.warn(
            f"{card.name} of {card.save.folder} on {peer.name if peer else 'this host'}: "
            f"{wrong:.300}; it is read from another host. Look at the memory of that one, or its "
            "connection",
            stacklevel=2,
        )

    def list(self, path: str) -> list[str]:
        return [manifest.NAME, *self._cards] if path == self.folder else []

    def is_folder(self, path: str) -> bool:
        return path == self.folder

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.folder}/")

    def _card(self, path: str) -> Card:
        card = self._cards.get(self._name(path))
        if card is None:
            raise CheckpointNotFoundError(f"{path}: does not exist")
        return card

    def create(self, path: str) -> Output:
        self._refuse(path)

    def make_folder(self, path: str) -> None:
        self._refuse(path)

    def rename(self, old: str, new: str) -> None:
        self._refuse(new)

    def remove(self, path: str) -> None:
        self._refuse(path)

    def sync_folder(self, path: str) -> None:
        self._refuse(path)

    def hold(self, path: str) -> Any:
        self._refuse(path)

    def is_held(self, path: str) -> bool:
        return False

    def _refuse(self, path: str) -> NoReturn:
        raise NotImplementedError(f"{path}: a save in memory is only read this way")
