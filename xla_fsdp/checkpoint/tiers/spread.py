"""One save as a checkpoint to read, its files on whichever hosts they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...consolidate.errors import CheckpointNotFoundError
from ...consolidate.format import manifest
from ...consolidate.format.store import Output, join
from .holding import Card, HostTier
from .wire import Peer


class SpreadStore:
    """A store (see :class:`~..consolidate.format.store.Store`) with one folder to read.

    ``cards``: of all ranks' files; ``peer_of``: who has a rank's file, ``None`` for this host.
    Files here are read here, others over the network; either way the caller compares every byte
    with the digests of the manifest.
    """

    renames = True

    def __init__(
        self,
        tier: HostTier,
        cards: Mapping[int, Card],
        whole: bytes,
        peer_of: Callable[[int], Peer | None],
    ) -> None:
        first = cards[0]
        self.folder = join(tier.root, f"step-{first.save.step:08d}")
        self._tier, self._manifest, self._peer_of = tier, whole, peer_of
        self._cards = {card.name: card for card in cards.values()}

    def size(self, path: str) -> int:
        name = self._name(path)
        return len(self._manifest) if name == manifest.NAME else self._card(path).record.size

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        if self._name(path) == manifest.NAME:
            out[:] = self._manifest[begin : begin + len(out)]
            return
        card = self._card(path)
        peer = self._peer_of(card.rank)
        if peer is None:
            own = join(self._tier.folder(card.save), card.name)
            self._tier.store.read_into(own, begin, out)
        else:
            peer.read_into(card, begin, out)

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
