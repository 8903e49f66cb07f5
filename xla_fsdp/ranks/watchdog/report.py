"""What is said of ranks that do not go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...tpu.slices import Groups
from ...wording import runs
from .waits import DEVICE

_CHARACTERS = 200_000


@dataclass(frozen=True)
class Place:
    """Where one rank is.

    Attributes:
        rank: its number.
        steps: how often its process has synced.
        silent: for how many seconds at least it has given no sign of life; 0 if it does.
        what: it does, in words.
        where: ``file:line`` in user code, or ``""``.
        stack: as text, or ``""``.
        ended: whether its function is over.
        process: host and process id, for people.
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


def named(places: Sequence[Place]) -> tuple[str, list[Place]]:
    """The ranks that the others wait for, and why it is them; none if no rank stands out."""
    running = [place for place in places if not place.ended]
    kept_waiting = any(place.what == DEVICE for place in running)
    for why, chosen in (
        ("ended by an exception", [one for one in places if one.what.startswith("raised")]),
        ("silent", [one for one in running if one.silent]),
        ("behind the others", _behind(running)),
        ("over already", [one for one in places if one.ended and kept_waiting]),
        ("not waiting as the others are", [one for one in running if one.what != DEVICE]),
        ("elsewhere than the others", _elsewhere(running)),
    ):
        if chosen and len(chosen) < len(places):
            return why, chosen
    return "", []


def _behind(running: Sequence[Place]) -> list[Place]:
    furthest = max((place.steps for place in running), default=0)
    # One may be ahead by a sync of its own; most can not be behind.
    behind = [place for place in running if place.steps < furthest]
    if 2 * len(behind) > len(running):
        return []
    # Two ranks of one process are as far as they are together.
    return [place for place in behind if place.what != DEVICE] or behind


def _elsewhere(running: Sequence[Place]) -> list[Place]:
    if not running:
        return []
    where, count = Counter(place.where for place in running).most_common(1)[0]
    return [one for one in running if one.where != where] if 2 * count > len(running) else []


def report(
    places: Sequence[Place], idle: float, timeout: float, slices: Groups = ()
) -> tuple[str, str, list[Place]]:
    """One line with the ranks that keep the others waiting; all ranks' places and stacks; and the
    ranks that are named. Equal places are told once, and so are equal stacks.

    ``slices``: ordinals of the ranks of each TPU slice, if there are several.
    """
    why, chosen = named(places)
    head = f"ranks have not gone on for {idle:.0f} s (timeout={timeout:g}); "
    if chosen:
        head += f"{why}: {_ranks(chosen)}{_slices(chosen, slices)}, {chosen[0].line()}"
    else:
        head += "all are equally far, and none stands out"
    told: dict[str, list[Place]] = {}
    for place in places:
        told.setdefault(place.line(), []).append(place)
    text = "".join(f"  {_ranks(group)}: {line}\n" for line, group in told.items())
    stacks: dict[str, list[Place]] = {}
    for place in sorted(places, key=lambda place: place.rank not in chosen):  # those named first
        if place.stack:
            stacks.setdefault(place.stack, []).append(place)
    for stack, group in stacks.items():
        first = group[0].process if len(group) == 1 else f"the first in {group[0].process}"
        text += f"stack of {_ranks(group)}, {first}:\n{stack}"
    if len(text) > _CHARACTERS:
        text = text[:_CHARACTERS] + "\n... and more that is left out\n"
    return head, text, chosen


def _slices(places: Sequence[Place], slices: Groups) -> str:
    """That these are all ranks of some slices, which are lost as a whole."""
    found = {place.rank for place in places}
    whole = [number for number, one in enumerate(slices) if found.issuperset(one)]
    if not whole or len(found) != sum(len(slices[number]) for number in whole):
        return ""
    return f", all of slice{'s' if len(whole) > 1 else ''} {', '.join(map(str, whole))}"


def _ranks(places: Sequence[Place]) -> str:
    return runs("rank", (place.rank for place in places))
