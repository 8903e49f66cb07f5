"""Which step to go on from, given what each host has.

A save is whole if every rank's file is on some host, whichever: hosts that are gone, new, or left
from an earlier attempt change nothing but what there is. The newest whole save wins; of one step
saved twice the later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .holding import Card, Save

# Of one host: step, save id, world size, ranks whose files are there.
Listed = tuple[int, str, int, Sequence[int]]
_SHOWN = 8  # ranks in a message


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
