"""The watcher of all ranks, and its report of ranks that make no progress."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...tpu.slices import Groups
from ...wording import runs
from ..channel import Channel
from .settings import WatchSettings, say
from .waits import DEVICE

_STACKS_OF_SILENT_RANKS = 32

_CHARACTERS = 200_000


class Watcher:
    """Watches all ranks. Every rank has a watcher, and that of one rank is on duty.

    All ranks read its lease. The lease has the rank of the watcher, a number that increases, the
    number of its last request for stacks, the processes that did not answer it, and the reason if
    all ranks must end.
    """

    def __init__(self, channel: Channel, chosen: WatchSettings, slices: Groups = ()) -> None:
        self._rank, self._settings, self._slices = channel.rank, chosen, slices
        self._store: Any = channel.store  # torch's annotations lack half of its methods
        self._own_lease = ""  # the lease in the store, while on duty
        self._ask, self._number = 0, 0
        self._silent: dict[int, dict[str, Any]] = {}
        self._end: str = ""
        self._named: int | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # a rank's last beat, and when it was read
        self._asked_at: float | None = None
        self._reported_at: float | None = None

    def lease(self) -> tuple[str, str]:
        """Returns its lease in the store, ``""`` if it is not on duty, and its next lease."""
        self._number += 1
        return self._own_lease, json.dumps({
            "by": self._rank, "number": self._number, "ask": self._ask, "silent": self._silent,
            "end": self._end, "named": self._named,
        })  # fmt: skip

    def on_duty(self, own_lease: str, ask: int) -> None:
        """Sets whether it is on duty.

        ``own_lease``: its lease in the store, or ``""`` if another watcher is on duty. ``ask``: the
        number of the last request for stacks.
        """
        self._own_lease = own_lease
        if not own_lease:
            self._ask, self._silent = ask, {}
            self._asked_at = self._reported_at = None

    def look(self) -> None:
        """Checks the progress of all ranks once."""
        now = time.monotonic()
        signs = self._signs(now)
        quiet = {rank: now - self._seen[rank][1] for rank in signs}
        running = [rank for rank, sign in signs.items() if not sign["ended"]]
        if not running:
            return
        idle = min(signs[rank]["idle"] + quiet[rank] for rank in running)
        # A silent rank may not be working any more.
        there = [rank for rank in running if quiet[rank] < self._settings.to_answer]
        work = any(signs[rank]["work"] for rank in there)
        steps = max(sign["steps"] for sign in signs.values())
        if idle < self._settings.timeout / 2:
            if self._reported_at is not None:
                say(f"ranks make progress again, {now - self._reported_at:.0f} s after the report")
            self._asked_at = self._reported_at = None
            self._silent = {}
        elif self._asked_at is not None:
            self._collect(now, idle, signs, quiet)
        elif self._reported_at is None and idle > self._settings.patience(steps, work):
            self._ask += 1
            self._asked_at = now

    def _signs(self, now: float) -> dict[int, dict[str, Any]]:
        roster = sorted({int(rank) for rank in self._store.get("roster").split()})
        found = self._store.multi_get([f"sign/{rank}" for rank in roster])
        signs = {rank: json.loads(sign) for rank, sign in zip(roster, found, strict=True)}
        for rank, sign in signs.items():
            if self._seen.get(rank, (0, 0.0))[0] != sign["beat"]:
                self._seen[rank] = (sign["beat"], now)
        return signs

    def _collect(
        self, now: float, idle: float, signs: dict[int, dict[str, Any]], quiet: dict[int, float]
    ) -> None:
        assert self._asked_at is not None  # only called after a request
        answered, list_of_them = set[int](), f"answered/{self._ask}"
        if self._store.check([list_of_them]):
            answered = {int(rank) for rank in self._store.get(list_of_them).split()}
        missing = [r for r, sign in signs.items() if not sign["ended"] and r not in answered]
        if missing and now - self._asked_at < self._settings.to_answer:
            return
        if missing and not self._silent:
            self._silent = {r: signs[r]["process"] for r in missing[:_STACKS_OF_SILENT_RANKS]}
            self._asked_at = now
            return
        ranks = sorted(answered & signs.keys())
        keys = [f"answer/{self._ask}/{rank}" for rank in ranks]
        answers = dict(zip(ranks, self._store.multi_get(keys), strict=True)) if keys else {}
        for key in keys:
            self._store.delete_key(key)
        places = []
        for rank, sign in signs.items():
            what, where, stack = json.loads(answers.get(rank, '["", "", ""]'))
            silent = not sign["ended"] and not what  # another process may have answered for it
            places.append(RankPlace(
                rank, sign["steps"], quiet[rank] if silent else 0.0,
                sign["ended"] or _describe_wait(what, sign["work"]), where, stack,
                bool(sign["ended"]), sign["name"],
            ))  # fmt: skip
        head, text, named = report(places, idle, self._settings.timeout, self._slices)
        say(f"{head}\n{text}")
        self._asked_at, self._reported_at, self._silent = None, now, {}
        if self._settings.end:
            self._end = f"{head}. All stacks are in the output of rank {self._rank}"
            self._named = named[0].rank if len(named) == 1 else None


def _describe_wait(what: str, work: str) -> str:
    if work == "compiling":
        return "compiling"
    return f"{what}, and its process computes" if work and what else what


@dataclass(frozen=True)
class RankPlace:
    """The place and progress of one rank.

    Attributes:
        rank: its number.
        steps: the number of syncs of its process.
        silent: the minimum number of seconds without a sign of life; 0 if it answers.
        what: a description of what it is doing.
        where: ``file:line`` in user code, or ``""``.
        stack: its stack as text, or ``""``.
        ended: whether its function has ended.
        process: host and process id, for the report.
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


def named(places: Sequence[RankPlace]) -> tuple[str, list[RankPlace]]:
    """The reason and the ranks for which the others wait; none if no rank differs from others."""
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


def _behind(running: Sequence[RankPlace]) -> list[RankPlace]:
    furthest = max((place.steps for place in running), default=0)
    # A rank may be ahead by a sync that only it does, so the majority is not behind.
    behind = [place for place in running if place.steps < furthest]
    if 2 * len(behind) > len(running):
        return []
    # Two ranks of one process share their progress.
    return [place for place in behind if place.what != DEVICE] or behind


def _elsewhere(running: Sequence[RankPlace]) -> list[RankPlace]:
    if not running:
        return []
    where, count = Counter(place.where for place in running).most_common(1)[0]
    return [one for one in running if one.where != where] if 2 * count > len(running) else []


def report(
    places: Sequence[RankPlace], idle: float, timeout: float, slices: Groups = ()
) -> tuple[str, str, list[RankPlace]]:
    """Returns one line about the ranks that hang, the places and stacks, and the ranks that hang.

    Places and stacks that several ranks share are listed once.

    ``slices``: ordinals of the ranks of each TPU slice, if there are several.
    """
    why, chosen = named(places)
    head = f"no rank has made progress for {idle:.0f} s (timeout={timeout:g}); "
    if chosen:
        head += f"{why}: {_ranks(chosen)}{_slices(chosen, slices)}, {chosen[0].line()}"
    else:
        head += "all have made the same progress, and no rank differs from the others"
    by_line: dict[str, list[RankPlace]] = {}
    for place in places:
        by_line.setdefault(place.line(), []).append(place)
    text = "".join(f"  {_ranks(group)}: {line}\n" for line, group in by_line.items())
    stacks: dict[str, list[RankPlace]] = {}
    for place in sorted(places, key=lambda place: place.rank not in chosen):  # chosen ranks first
        if place.stack:
            stacks.setdefault(place.stack, []).append(place)
    for stack, group in stacks.items():
        first = group[0].process if len(group) == 1 else f"the first in {group[0].process}"
        text += f"stack of {_ranks(group)}, {first}:\n{stack}"
    if len(text) > _CHARACTERS:
        text = text[:_CHARACTERS] + "\n... (the rest is omitted)\n"
    return head, text, chosen


def _slices(places: Sequence[RankPlace], slices: Groups) -> str:
    """Text for the report if these are exactly all ranks of one or more slices."""
    found = {place.rank for place in places}
    whole = [number for number, one in enumerate(slices) if found.issuperset(one)]
    if not whole or len(found) != sum(len(slices[number]) for number in whole):
        return ""
    return f", all of slice{'s' if len(whole) > 1 else ''} {', '.join(map(str, whole))}"


def _ranks(places: Sequence[RankPlace]) -> str:
    return runs("rank", (place.rank for place in places))
