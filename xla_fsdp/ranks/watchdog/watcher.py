"""What the rank does that watches over all."""

from __future__ import annotations

import json
import time
from typing import Any

from ...tpu.slices import Groups
from ..channel import Channel
from .report import Place, report
from .settings import Settings, say

_SILENT_RANKS_ASKED_FOR = 32


class Watcher:
    """Every rank has one, and that of one rank is on duty.

    Its lease is what all ranks read: who it is, a number that moves, the number of its last
    question (where are you?), processes that did not answer it, and why all are to end.
    """

    def __init__(self, channel: Channel, chosen: Settings, slices: Groups = ()) -> None:
        self._rank, self._settings, self._slices = channel.rank, chosen, slices
        self._store: Any = channel.store  # torch's annotations lack half of its methods
        self._said = ""  # as the store has it, while on duty
        self._ask, self._number = 0, 0
        self._silent: dict[int, dict[str, Any]] = {}
        self._end: str = ""
        self._named: int | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # a rank's last beat, and when it came
        self._asked_at: float | None = None
        self._reported_at: float | None = None

    def lease(self) -> tuple[str, str]:
        """What the store has of it, ``""`` if it is not on duty, and what it says next."""
        self._number += 1
        return self._said, json.dumps({
            "by": self._rank, "number": self._number, "ask": self._ask, "silent": self._silent,
            "end": self._end, "named": self._named,
        })  # fmt: skip

    def on_duty(self, said: str, ask: int) -> None:
        """What it said counts, or, if that is ``""``, the question of somebody else."""
        self._said = said
        if not said:
            self._ask, self._silent = ask, {}
            self._asked_at = self._reported_at = None

    def look(self) -> None:
        """One look at all ranks."""
        now = time.monotonic()
        signs = self._signs(now)
        quiet = {rank: now - self._seen[rank][1] for rank in signs}
        running = [rank for rank, sign in signs.items() if not sign["ended"]]
        if not running:
            return
        idle = min(signs[rank]["idle"] + quiet[rank] for rank in running)
        # What a silent rank was at work on is not known to go on.
        there = [rank for rank in running if quiet[rank] < self._settings.to_answer]
        work = any(signs[rank]["work"] for rank in there)
        steps = max(sign["steps"] for sign in signs.values())
        if idle < self._settings.timeout / 2:
            if self._reported_at is not None:
                say(f"ranks go on, {now - self._reported_at:.0f} s after that was told")
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
        assert self._asked_at is not None  # or nobody is asked
        answered, list_of_them = set[int](), f"answered/{self._ask}"
        if self._store.check([list_of_them]):
            answered = {int(rank) for rank in self._store.get(list_of_them).split()}
        missing = [r for r, sign in signs.items() if not sign["ended"] and r not in answered]
        if missing and now - self._asked_at < self._settings.to_answer:
            return
        if missing and not self._silent:
            self._silent = {r: signs[r]["process"] for r in missing[:_SILENT_RANKS_ASKED_FOR]}
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
            silent = not sign["ended"] and not what  # a neighbour may have answered for it
            places.append(Place(
                rank, sign["steps"], quiet[rank] if silent else 0.0,
                sign["ended"] or _told(what, sign["work"]), where, stack, bool(sign["ended"]),
                sign["name"],
            ))  # fmt: skip
        head, text, named = report(places, idle, self._settings.timeout, self._slices)
        say(f"{head}\n{text}")
        self._asked_at, self._reported_at, self._silent = None, now, {}
        if self._settings.end:
            self._end = f"{head}; all stacks are in the output of rank {self._rank}"
            self._named = named[0].rank if len(named) == 1 else None


def _told(what: str, work: str) -> str:
    if work == "compiling":
        return "compiling"
    return f"{what}, and its process computes" if work and what else what
