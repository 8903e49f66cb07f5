"""The fast tier of one host: a folder with the files of its ranks, and copies of another host's::

    save-00000120-0186f3a1c2d4e5f6/rank-00003-of-00008.safetensors
                                  /rank-00003-of-00008.json

The second file, the card, is renamed into place last; a file without a card is ignored. The card of
rank 0 also has the manifest, without the list of files.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...consolidate.errors import CheckpointError, CheckpointNotFoundError, InvalidMetadataError
from ...consolidate.format.digests import digest
from ...consolidate.format.manifest import dump_manifest, file_name, load_file
from ...consolidate.format.rank_file import FileRecord, write_file
from ...consolidate.format.store import Store, join, read, write
from ...consolidate.format.strict import Fields, read_json, write_json
from ..contents import Contents

_SAVE = re.compile(r"save-([0-9]{8,18})-([0-9a-f]{16})")
_CARD = re.compile(r"rank-([0-9]{5,})-of-([0-9]{5,})\.json")
_TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{16}\.draft")


@dataclass(frozen=True, order=True)
class Save:
    """Later saves have greater ids, also of other processes, unless the clock was set back."""

    step: int
    save_id: str

    @property
    def folder(self) -> str:
        return f"save-{self.step:08d}-{self.save_id}"


@dataclass(frozen=True)
class Card:
    """Describes the file of one rank: its size and digests, the save and the run.

    Attributes:
        run: digest of the durable path, which distinguishes training runs that use the same folder.
        manifest: on the card of rank 0 the manifest without files, otherwise "".
    """

    save: Save
    world_size: int
    rank: int
    run: str
    record: FileRecord
    manifest: str = ""

    def without_manifest(self) -> Card:
        return replace(self, manifest="")

    def dump(self) -> bytes:
        body = write_json(
            {
                "step": self.save.step,
                "save_id": self.save.save_id,
                "world_size": self.world_size,
                "rank": self.rank,
                "run": self.run,
                "file": vars(self.record),
                "manifest": self.manifest,
            }
        )
        return write_json([digest(body), body.decode()])

    @classmethod
    def load(cls, data: bytes, label: str) -> Card:
        """Raises InvalidMetadataError if ``data`` is not a card, or was changed."""
        outer = read_json(data, label)
        if not (
            isinstance(outer, list)
            and len(outer) == 2
            and all(isinstance(part, str) for part in outer)
            and digest(outer[1].encode()) == outer[0]
        ):
            raise InvalidMetadataError(
                f"{label}: its digest does not match its content: it is damaged or not a card"
            )
        found = Fields(read_json(outer[1].encode(), label), label)
        world, rank = found.integer("world_size", least=1), found.integer("rank")
        record = load_file(found.child("file"), rank, world)
        save = Save(found.integer("step"), found.text("save_id"))
        run, manifest = found.text("run"), found.json("manifest")
        if not isinstance(manifest, str) or not _SAVE.fullmatch(save.folder) or rank >= world:
            raise InvalidMetadataError(
                f"{label}: step {save.step}, save id {save.save_id!r:.40} and rank {rank} of "
                f"{world} are not valid"
            )
        return cls(save, world, rank, run, record, manifest)


class HostTier:
    """The folder of one host. ``run``: files of other runs are ignored."""

    def __init__(self, store: Store, root: str, run: str) -> None:
        self.store, self.root, self.run = store, root, run

    def folder(self, save: Save) -> str:
        return join(self.root, save.folder)

    def temporary_file(self, save: Save) -> str:
        return join(self.folder(save), f".{secrets.token_hex(8)}.draft")

    def write(self, save: Save, contents: Contents, rank: int) -> Card:
        """Writes a rank's file and card. ``contents`` must have the id of ``save``."""
        world = contents.manifest.world_size
        self.store.make_folder(self.folder(save))
        name, temporary = file_name(rank, world), self.temporary_file(save)
        record = write_file(self.store, temporary, contents.items, contents.metadata(rank))
        record = replace(record, name=name)
        self.store.rename(temporary, join(self.folder(save), name))
        manifest = dump_manifest(contents.manifest).decode() if rank == 0 else ""
        card = Card(save, world, rank, self.run, record, manifest)
        self.add_card(card)
        return card

    def add_card(self, card: Card) -> None:
        temporary = self.temporary_file(card.save)
        write(self.store, temporary, card.dump())
        self.store.rename(temporary, join(self.folder(card.save), _card_name(card)))

    def saves(self) -> Iterator[Save]:
        """All saves that have a folder, complete or not, of any run."""
        for match in filter(None, map(_SAVE.fullmatch, self.store.list(self.root))):
            save = Save(int(match[1]), match[2])
            if save.folder == match[0]:
                yield save

    def present(self) -> list[Save]:
        """:meth:`saves`, or an empty list if the folder cannot be read now."""
        try:
            return list(self.saves())
        except CheckpointError:
            return []

    def cards(self, save: Save) -> list[Card]:
        """This run's cards of ``save``, in rank order, without damaged or incomplete ones."""
        folder, found = self.folder(save), []
        for name in filter(_CARD.fullmatch, self.store.list(folder)):
            path = join(folder, name)
            with contextlib.suppress(CheckpointError):
                card = Card.load(read(self.store, path, 0, self.store.size(path)), path)
                size = self.store.size(join(folder, card.record.name))
                own = card.run == self.run and card.save == save and _card_name(card) == name
                if own and size == card.record.size:
                    found.append(card)
        return sorted(found, key=lambda card: card.rank)

    def card(self, wanted: Card) -> Card:
        """This host's card, with manifest. Raises CheckpointNotFoundError."""
        for card in self.cards(wanted.save):
            if card.without_manifest() == wanted:
                return card
        name = join(wanted.save.folder, wanted.record.name)
        raise CheckpointNotFoundError(f"{name} is not on this host")

    def discard(self, unwanted: Iterable[Save]) -> None:
        """Removes saves. Cards are removed first, so a partly removed save is not complete."""
        for save in unwanted:
            with contextlib.suppress(CheckpointError):
                self._remove_files(save, _CARD)
                self.store.remove(self.folder(save))

    def clean(self) -> None:
        """Removes incomplete files of killed processes. No process may write at this time."""
        for save in self.present():
            with contextlib.suppress(CheckpointError):
                self._remove_files(save, _TEMPORARY_FILE)

    def _remove_files(self, save: Save, names: re.Pattern[str]) -> None:
        for name in self.store.list(self.folder(save)):
            if names.fullmatch(name):
                self.store.remove(join(self.folder(save), name))


def _card_name(card: Card) -> str:
    return card.record.name.removesuffix(".safetensors") + ".json"
