"""The fast tier of one host: a folder in memory, with files of ranks that run here, and copies of
those that run on another host.

::

    /dev/shm/run/save-00000120-0186f3a1c2d4e5f6/rank-00003-of-00008.safetensors
                                               /rank-00003-of-00008.json

The second file says what the first must be: size and digests, which save, which run. It appears
last, by a rename; a file without it does not count. That of rank 0 has the manifest, too, but for
the list of files, which nobody knows before all hosts are asked.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ...consolidate.errors import CheckpointError, CheckpointNotFoundError, InvalidMetadataError
from ...consolidate.format.digests import digest
from ...consolidate.format.fields import Fields
from ...consolidate.format.manifest import (
    dump_files,
    dump_manifest,
    file_name,
    load_file,
    with_files,
)
from ...consolidate.format.rank_file import FileRecord, write_file
from ...consolidate.format.store import Store, join, read, write
from ...consolidate.format.strict import read_json, write_json
from ..contents import Contents

_SAVE = re.compile(r"save-([0-9]{8,18})-([0-9a-f]{16})")
_CARD = re.compile(r"rank-([0-9]{5,})-of-([0-9]{5,})\.json")
_DRAFT = re.compile(r"\.[0-9a-f]{16}\.draft")


@dataclass(frozen=True, order=True)
class Save:
    """One save; ids of later ones are greater, whoever made them."""

    step: int
    save_id: str

    @property
    def folder(self) -> str:
        return f"save-{self.step:08d}-{self.save_id}"


@dataclass(frozen=True)
class Card:
    """What is known of one rank's file.

    ``run``: digest of what tells one training run from another that used this folder. ``manifest``:
    on rank 0's the manifest without files, else "".
    """

    save: Save
    world_size: int
    rank: int
    run: str
    record: FileRecord
    manifest: str = ""

    @property
    def name(self) -> str:
        return file_name(self.rank, self.world_size)

    def bare(self) -> Card:
        """Without the manifest, which is long: enough to name a file by."""
        return replace(self, manifest="")

    def dump(self) -> bytes:
        body = write_json(
            {
                "step": self.save.step,
                "save_id": self.save.save_id,
                "world_size": self.world_size,
                "rank": self.rank,
                "run": self.run,
                "file": dump_files([self.record])[0],
                "manifest": self.manifest,
            }
        )
        return write_json([digest(body), body.decode()])

    @classmethod
    def load(cls, data: bytes, label: str) -> Card:
        """Raises InvalidMetadataError: it is no card, or was changed."""
        outer = read_json(data, label)
        if not (
            isinstance(outer, list)
            and len(outer) == 2
            and all(isinstance(part, str) for part in outer)
            and digest(outer[1].encode()) == outer[0]
        ):
            raise InvalidMetadataError(f"{label}: its bytes are not those that were written")
        found = Fields(read_json(outer[1].encode(), label), label)
        world, rank = found.whole("world_size", least=1), found.whole("rank")
        record = load_file(found.child("file"), rank, world)
        save = Save(found.whole("step"), found.text("save_id"))
        run, manifest = found.text("run"), found.json("manifest")
        if not isinstance(manifest, str) or not _SAVE.fullmatch(save.folder) or rank >= world:
            raise InvalidMetadataError(f"{label}: is of no save that can be")
        return cls(save, world, rank, run, record, manifest)


class HostTier:
    """The folder of one host. ``run``: only saves of this run are seen."""

    def __init__(self, store: Store, root: str, run: str) -> None:
        self.store, self.root, self.run = store, root, digest(run.encode())

    def folder(self, save: Save) -> str:
        return join(self.root, save.folder)

    def write(self, save: Save, contents: Contents, rank: int) -> Card:
        """Writes a rank's file and its card; it counts when this returns.

        ``contents``: with the save's id in its manifest.
        """
        world = contents.manifest.world_size
        folder = self.folder(save)
        self.store.make_folder(folder)
        name = file_name(rank, world)
        draft = join(folder, f".{secrets.token_hex(8)}.draft")
        record = write_file(self.store, draft, contents.items, contents.metadata(rank))
        record = FileRecord(name, record.size, record.chunk, record.digests)
        self.store.rename(draft, join(folder, name))
        manifest = dump_manifest(contents.manifest).decode() if rank == 0 else ""
        card = Card(save, world, rank, self.run, record, manifest)
        self.add_card(card)
        return card

    def add_card(self, card: Card) -> None:
        """Makes the file that is there by now count."""
        folder = self.folder(card.save)
        draft = join(folder, f".{secrets.token_hex(8)}.draft")
        write(self.store, draft, card.dump())
        self.store.rename(draft, join(folder, _card_name(card.name)))

    def saves(self) -> Iterator[Save]:
        """Of which there is anything, of whatever run."""
        for name in self.store.list(self.root):
            match = _SAVE.fullmatch(name)
            if match:
                save = Save(int(match[1]), match[2])
                if save.folder == name:
                    yield save

    def present(self) -> list[Save]:
        """:meth:`saves`, none where the folder cannot be read: for what can be done later."""
        try:
            return list(self.saves())
        except CheckpointError:
            return []

    def cards(self, save: Save) -> list[Card]:
        """Of the files of ``save`` that are here, of this run; by rank. Damaged ones are passed
        over, and so are those whose files are not as long as they say."""
        folder, found = self.folder(save), []
        for name in self.store.list(folder):
            if not _CARD.fullmatch(name):
                continue
            path = join(folder, name)
            with contextlib.suppress(CheckpointError):
                card = Card.load(read(self.store, path, 0, self.store.size(path)), path)
                size = self.store.size(join(folder, card.name))
                if card.run == self.run and card.save == save and size == card.record.size:
                    if _card_name(card.name) == name:
                        found.append(card)
        return sorted(found, key=lambda card: card.rank)

    def discard(self, unwanted: Iterable[Save]) -> None:
        """Removes saves. The cards first: a save that is half removed is not whole."""
        for save in unwanted:
            folder = self.folder(save)
            with contextlib.suppress(CheckpointError):
                for name in self.store.list(folder):
                    if _CARD.fullmatch(name):
                        self.store.remove(join(folder, name))
                self.store.remove(folder)

    def clean(self) -> None:
        """Removes what processes that were killed left half written; nobody may be writing."""
        for save in self.present():
            folder = self.folder(save)
            with contextlib.suppress(CheckpointError):
                for name in self.store.list(folder):
                    if _DRAFT.fullmatch(name):
                        self.store.remove(join(folder, name))


def own_card(tier: HostTier, wanted: Card) -> Card:
    """The card of this host for the file of ``wanted``, with its manifest.

    Raises:
        CheckpointNotFoundError: it has none.
    """
    for card in tier.cards(wanted.save):
        if card.bare() == wanted:
            return card
    raise CheckpointNotFoundError(f"{wanted.name} of {wanted.save.folder} is not here")


def _card_name(file: str) -> str:
    return file.removesuffix(".safetensors") + ".json"


def manifest_of(cards: Mapping[int, Card]) -> bytes:
    """The manifest of a save, all of whose cards are there, by rank."""
    first = cards[0]
    records = [cards[rank].record for rank in range(first.world_size)]
    return with_files(first.manifest.encode(), records, f"manifest of {first.save.folder}")
