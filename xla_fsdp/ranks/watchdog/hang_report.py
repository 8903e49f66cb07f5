"""The report of ranks that make no progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...tpu.slices import Groups
from ...wording import runs
from .waits import DEVICE

_CHARACTERS = 200_000


@dataclass(frozen=True)
class RankStatus:
    """The place and progress of one rank.

    Attributes:
        steps: the number of syncs of its process.
        silent: the minimum number of seconds without a sign of life; 0 if it answers.
        what, where: what it does, and ``file:line`` in user code, or ``""``.
        ended: whether its function has ended.
    """

    rank: int
    steps: int
    silent: float
    what: str
    where: str
    stack: str
    ended: bool
    process: str

    def line(self) -> str:
        text = self.what
        if self.silent:
            text = f"no sign of life for at least {self.silent:.0f} s"
            text += f"; {self.what}" if self.what else ""
        if self.where:
            text += f", at {self.where}"
        return text if self.ended else f"{text}, after {self.steps} steps"


def find_hanging_ranks(places: Sequence[RankStatus]) -> tuple[str, list[RankStatus]]:
    """The reason and the ranks for which the others wait; no ranks if none differs."""
    running = [place for place in places if not place.ended]
    kept_waiting = any(place.what == DEVICE for place in running)
    for why, chosen in (
        ("ended by an exception", [one for one in places if one.what.startswith("raised")]),
        ("silent", [one for one in running if one.silent]),
        ("behind the others", _behind(running)),
        ("ended already", [one for one in places if one.ended and kept_waiting]),
        ("not waiting like the others", [one for one in running if one.what != DEVICE]),
        ("at another place than the others", _elsewhere(running)),
    ):
        if chosen and len(chosen) < len(places):
            return why, chosen
    return "", []


def _behind(running: Sequence[RankStatus]) -> list[RankStatus]:
    furthest = max((place.steps for place in running), default=0)
    # A rank may be ahead by a sync of its own.
    behind = [place for place in running if place.steps < furthest]
    if 2 * len(behind) > len(running):
        return []
    # Two ranks of a process share their progress.
    return [place for place in behind if place.what != DEVICE] or behind


def _elsewhere(running: Sequence[RankStatus]) -> list[RankStatus]:
    if not running:
        return []
    where, count = Counter(place.where for place in running).most_common(1)[0]
    return [one for one in running if one.where != where] if 2 * count > len(running) else []


def hang_text(
    places: Sequence[RankStatus], idle: float, timeout: float, slices: Groups = ()
) -> tuple[str, str, list[RankStatus]]:
    """Returns a line about the ranks that hang, places and stacks, and these ranks."""
    why, chosen = find_hanging_ranks(places)
    head = f"no rank has made progress for {idle:.0f} s (timeout={timeout:g}); "
    if chosen:
        head += f"{why}: {_ranks_text(chosen)}{_slices(chosen, slices)}, {chosen[0].line()}"
    else:
        head += "all have made the same progress, and no rank differs from the others"
    by_line: dict[str, list[RankStatus]] = {}
    for place in places:
        by_line.setdefault(place.line(), []).append(place)
    text = "".join(f"  {_ranks_text(group)}: {line}\n" for line, group in by_line.items())
    stacks: dict[str, list[RankStatus]] = {}
    for place in sorted(places, key=lambda place: place not in chosen):  # chosen ranks first
        if place.stack:
            stacks.setdefault(place.stack, []).append(place)
    for stack, group in stacks.items():
        first = group[0].process if len(group) == 1 else f"the first in {group[0].process}"
        text += f"stack of {_ranks_text(group)}, {first}:\n{stack}"
    if len(text) > _CHARACTERS:
        text = text[:_CHARACTERS] + "\n... (the rest is omitted)\n"
    return head, text, chosen


def _slices(places: Sequence[RankStatus], slices: Groups) -> str:
    """Names slices if these are exactly all of their ranks."""
    found = {place.rank for place in places}
    whole = [number for number, one in enumerate(slices) if found.issuperset(one)]
    if not whole or len(found) != sum(len(slices[number]) for number in whole):
        return ""
    return f", all of slice{'s' if len(whole) > 1 else ''} {', '.join(map(str, whole))}"


def _ranks_text(places: Sequence[RankStatus]) -> str:
    return runs("rank", (place.rank for place in places))
