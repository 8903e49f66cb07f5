"""Ranks in processes of their own that do not go on: which one keeps the others waiting, and where.

A thread beside each rank looks now and then how far its process is (``waits.py``) and leaves that
in the ranks' store. One of them, the watcher, reads what all have left. Programs hold ranks
together, so that one that hangs stops all of them: when nothing has moved in any process for the
timeout, the watcher asks all ranks for their stacks and prints them (``hang_report.py``).

A rank that keeps Python's lock stops its own thread, too, and gives no sign of life. Its neighbours
on the same host then get its stack by a signal, whose handler is faulthandler's, in C. If it is the
watcher that is silent, another one takes its place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import spawned
from .channel import Channel, open_channel
from .errors import RankTimeoutError
from .hang_report import Place, report
from .waits import Progress, doing

#: ``off``, or seconds instead of launch's ``timeout``, or these and ``,end``.
VARIABLE = "XLA_FSDP_WATCHDOG"
# Of the timeout, while a process compiles or computes, and before there was a first step.
_TIMES_AT_WORK = 4
_SECONDS_BETWEEN_BEATS, _BEATS_IN_TIMEOUT = 5.0, 20
_BEATS_TO_ANSWER, _SECONDS_TO_ANSWER = 3, 2.0  # whichever is longer
_SILENT_RANKS_ASKED_FOR = 32
# Of the real-time signals, which nothing uses by itself; never sent to a process without a handler.
_SIGNAL = signal.SIGRTMAX - 7
_MEMORY_FILE = "xla_fsdp-stacks"


@dataclass(frozen=True)
class Settings:
    """``timeout``: seconds without any progress. ``end``: whether ranks are ended then."""

    timeout: float
    end: bool

    @property
    def beat(self) -> float:
        """Seconds from one look to the next."""
        return min(_SECONDS_BETWEEN_BEATS, self.timeout / _BEATS_IN_TIMEOUT)

    @property
    def to_answer(self) -> float:
        """Seconds that a rank has for a sign of life."""
        return max(_BEATS_TO_ANSWER * self.beat, _SECONDS_TO_ANSWER)


def settings(timeout: float) -> Settings | None:
    """What the user asked for: ``timeout`` of launch, unless the environment says otherwise.

    Raises:
        ValueError: the variable has another form.
    """
    said = os.environ.get(VARIABLE, "").replace(" ", "").lower()
    if said == "off":
        return None
    seconds, _, end = said.partition(",") if said != "end" else ("", ",", "end")
    with contextlib.suppress(ValueError):
        value = float(seconds) if seconds else timeout
        if 0 < value < float("inf") and end in ("", "end"):
            return Settings(value, end == "end")
    raise ValueError(
        f"{VARIABLE}={os.environ[VARIABLE]!r}: allowed are off, a positive number of seconds, end, "
        "or both, as in 900,end"
    )


def watched(fn: Callable, timeout: float) -> Callable:
    """``fn``, to be run as ranks that are watched; can be pickled if ``fn`` can."""
    chosen = settings(timeout)
    return fn if chosen is None else _Watched(fn, chosen)


class _Watched:
    def __init__(self, fn: Callable, chosen: Settings) -> None:
        self.fn, self.chosen = fn, chosen

    def __call__(self, rank: int, *args: Any) -> Any:
        try:
            watch = _Watch(open_channel("watchdog"), self.chosen)
        except RuntimeError as error:
            warnings.warn(f"nobody watches whether rank {rank} hangs: {error}", stacklevel=2)
            return self.fn(rank, *args)
        with watch.around():
            return self.fn(rank, *args)


class _Watch:
    """One rank's part; made on its own thread."""

    def __init__(self, channel: Channel, chosen: Settings) -> None:
        self._rank, self._store, self._settings = channel.rank, channel.store, chosen
        self._thread = threading.get_ident()
        self._progress = Progress()
        self._over = threading.Event()
        self._ended = ""
        self._beats = 0
        self._duty = _Duty(channel, chosen)
        self._lease = ""  # what the watcher said last, and when this rank first saw that
        self._lease_since = time.monotonic()
        self._answered = 0
        self._helped: set[int] = set()
        self._stacks = os.memfd_create(_MEMORY_FILE)
        # Kept to the end of the process, like the file: a signal may be on its way.
        if signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(_SIGNAL, self._stacks, all_threads=True)
        self._process = {
            "host": _host(), "name": f"process {os.getpid()} of {socket.gethostname()}",
            "pid": os.getpid(), "file": self._stacks, "thread": f"{self._thread:#018x}",
        }  # fmt: skip
        self._beater = threading.Thread(
            target=self._run, name=f"xla_fsdp-watchdog-{self._rank}", daemon=True
        )

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Within, the rank is watched. Nobody waits for it after that."""
        self._beater.start()
        self._ended = "ended"
        try:
            yield
            self._ended = "its function returned"
        except BaseException as error:
            self._ended = f"raised {type(error).__name__}"
            with contextlib.suppress(Exception):  # whatever the user's class does there
                self._ended += f": {error!s:.300}"
            raise
        finally:
            self._over.set()
            self._beater.join(1.0)  # a store that hangs must not keep the rank

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._beat("")
                if self._beats == 1:
                    self._store.append("roster", f"{self._rank} ")
                self._listen()
                self._over.wait(self._settings.beat)
            self._beat(self._ended)
        except RuntimeError as error:
            if not self._over.is_set():
                self._alone(str(error))

    def _beat(self, ended: str) -> None:
        self._beats += 1
        steps, idle, work = self._progress.look()
        sign = {"beat": self._beats, "steps": steps, "idle": idle, "work": work, "ended": ended}
        self._store.set(f"sign/{self._rank}", json.dumps(sign | self._process))

    def _listen(self) -> None:
        now = time.monotonic()
        own = self._duty.lease()
        expected = self._duty.said if self._duty.on else ""
        if not self._duty.on and now - self._lease_since > 2 * self._settings.to_answer:
            expected = self._lease  # the watcher gives no sign of life
        said = self._store.compare_set("watcher", expected, own).decode()
        if said != self._lease:
            self._lease, self._lease_since = said, now
        lease = json.loads(said)
        self._duty.granted(said == own, lease, said)
        if lease["ask"] > self._answered:
            self._answered = lease["ask"]
            what, where, stack = doing(self._thread)
            self._answer(lease["ask"], self._rank, [what, where, stack])
        for rank, process in lease["silent"].items():
            if int(rank) != self._rank and process["host"] == self._process["host"]:
                if int(rank) not in self._helped:
                    self._helped.add(int(rank))
                    self._answer(lease["ask"], int(rank), ["", *_stack_of(process)])
        if not lease["silent"]:
            self._helped.clear()
        if lease["end"]:
            # First everybody reads it: the store may end with the first process that does.
            time.sleep(self._settings.to_answer)
            spawned.fail(self._rank, RankTimeoutError(lease["end"], lease["named"]))
        if self._duty.on:
            self._duty.watch()

    def _answer(self, ask: int, rank: int, answer: list[str]) -> None:
        self._store.set(f"answer/{ask}/{rank}", json.dumps(answer))
        self._store.append(f"answered/{ask}", f"{rank} ")

    def _alone(self, why: str) -> None:
        """Without a store there is still this rank to be told of."""
        while not self._over.wait(self._settings.beat):
            steps, idle, work = self._progress.look()
            if idle > self._settings.timeout * (_TIMES_AT_WORK if work or not steps else 1):
                what, where, stack = doing(self._thread)
                head = (
                    f"rank {self._rank} has not gone on for {idle:.0f} s, and of the others it "
                    f"hears nothing: their store was lost ({why.splitlines()[0]:.200}), with the "
                    "process that launched the ranks of the first host"
                )
                _say(f"{head}\n  rank {self._rank}: {what}, at {where}\n{stack}")
                if self._settings.end:
                    spawned.fail(self._rank, RankTimeoutError(head))
                return


class _Duty:
    """What the watcher does. All ranks have it; one is on duty.

    Attributes:
        on: whether it is this one.
        said: its last lease, as the store has it.
    """

    def __init__(self, channel: Channel, chosen: Settings) -> None:
        self._rank, self._store, self._settings = channel.rank, channel.store, chosen
        self.on, self.said = False, ""
        self._next: dict[str, Any] = {
            "by": self._rank, "number": 0, "ask": 0, "silent": {}, "end": "", "named": None,
        }  # fmt: skip
        self._seen: dict[int, tuple[int, float]] = {}  # the last beat, and when it came
        self._asked_at: float | None = None
        self._reported_at: float | None = None

    def lease(self) -> str:
        """What it says of itself to all."""
        self._next["number"] += 1
        return json.dumps(self._next)

    def granted(self, on: bool, lease: dict[str, Any], said: str) -> None:
        """Whether it is on duty; if it is not, it goes on from ``lease`` when it comes to be."""
        if not on:
            self._next |= {"ask": lease["ask"]}
            self._asked_at = self._reported_at = None
        self.on, self.said = on, said

    def watch(self) -> None:
        """One look at all ranks."""
        now = time.monotonic()
        signs = self._signs(now)
        silent = {rank: now - self._seen[rank][1] for rank in signs}
        running = {rank: sign for rank, sign in signs.items() if not sign["ended"]}
        if not running:
            return
        idle = min(sign["idle"] + silent[rank] for rank, sign in running.items())
        steps = max(sign["steps"] for sign in running.values())
        # What a silent rank was at work on is not known to go on.
        work = any(sign["work"] for rank, sign in running.items() if not self._is_silent(rank, now))
        timeout = self._settings.timeout * (_TIMES_AT_WORK if work or not steps else 1)
        if idle < self._settings.timeout / 2:
            if self._reported_at is not None:
                _say(f"ranks go on, after {now - self._reported_at:.0f} s more")
            self._asked_at = self._reported_at = None
            self._next["silent"] = {}
        elif self._reported_at is None and self._asked_at is None and idle > timeout:
            self._next["ask"] += 1
            self._asked_at = now
        elif self._asked_at is not None:
            self._collect(now, idle, signs, silent)

    def _signs(self, now: float) -> dict[int, dict[str, Any]]:
        roster = sorted({int(rank) for rank in self._store.get("roster").split()})
        found = self._store.multi_get([f"sign/{rank}" for rank in roster])
        signs = {rank: json.loads(sign) for rank, sign in zip(roster, found, strict=True)}
        for rank, sign in signs.items():
            if self._seen.get(rank, (0, 0.0))[0] != sign["beat"]:
                self._seen[rank] = (sign["beat"], now)
        return signs

    def _is_silent(self, rank: int, now: float) -> bool:
        return now - self._seen[rank][1] > self._settings.to_answer

    def _collect(
        self,
        now: float,
        idle: float,
        signs: dict[int, dict[str, Any]],
        silent: dict[int, float],
    ) -> None:
        assert self._asked_at is not None
        ask = self._next["ask"]
        answered = set()
        if self._store.check([f"answered/{ask}"]):
            answered = {int(rank) for rank in self._store.get(f"answered/{ask}").split()}
        missing = [rank for rank, sign in signs.items() if not sign["ended"]]
        missing = [rank for rank in missing if rank not in answered]
        if missing and now - self._asked_at < self._settings.to_answer:
            return
        if missing and not self._next["silent"]:
            few = missing[:_SILENT_RANKS_ASKED_FOR]
            keys = ("host", "pid", "file", "thread")
            self._next["silent"] = {rank: {key: signs[rank][key] for key in keys} for rank in few}
            self._asked_at = now
            return
        numbers = sorted(answered & signs.keys())
        keys = [f"answer/{ask}/{rank}" for rank in numbers]
        answers = dict(zip(numbers, self._store.multi_get(keys), strict=True)) if keys else {}
        for key in keys:
            self._store.delete_key(key)
        asked = {int(rank) for rank in self._next["silent"]}
        places = []
        for rank, sign in signs.items():
            what, where, stack = json.loads(answers.get(rank, '["", "", ""]'))
            quiet = not sign["ended"] and (rank in asked or rank in missing)
            places.append(Place(
                rank, sign["steps"], sign["idle"] + silent[rank], silent[rank] if quiet else 0.0,
                sign["ended"] or _told(what, sign), where, stack, bool(sign["ended"]), sign["name"],
            ))  # fmt: skip
        head, text, chosen = report(places, idle, self._settings.timeout)
        _say(f"{head}\n{text}")
        self._asked_at, self._reported_at = None, now
        if self._settings.end:
            self._next |= {"end": f"{head}; all stacks are in the output of rank {self._rank}"}
            self._next |= {"named": chosen[0].rank if len(chosen) == 1 else None}


def _told(what: str, sign: dict[str, Any]) -> str:
    if sign["work"] == "compiling":
        return "compiles"
    return f"{what}, and its process computes" if sign["work"] else what


def _stack_of(process: dict[str, Any]) -> tuple[str, str]:
    """Where and stack of a process of this host whose Python does not answer."""
    link = f"/proc/{process['pid']}/fd/{process['file']}"
    try:
        if not os.readlink(link).startswith(f"/memfd:{_MEMORY_FILE}"):
            return "", "  its process has ended\n"
        handled = int(_caught(process["pid"]), 16) >> (_SIGNAL - 1) & 1
        if not handled:
            return "", ""
        os.kill(process["pid"], _SIGNAL)
        time.sleep(0.3)
        with open(link) as file:
            text = file.read(200_000)
    except FileNotFoundError:
        return "", "  its process has ended\n"
    except OSError as error:  # another user's, perhaps
        return "", f"  its process can not be asked ({error})\n"
    # The thread of the rank is the one to show; others are of two ranks in one process.
    threads = re.split(r"\n(?=Thread 0x|Current thread 0x)", text)
    own = [one for one in threads if process["thread"] in one.partition("\n")[0]]
    return "", "".join(f"{one[-6_000:].rstrip()}\n" for one in own or threads)[-6_000:]


def _caught(pid: int) -> str:
    with open(f"/proc/{pid}/status") as file:
        return next(line.split()[1] for line in file if line.startswith("SigCgt:"))


def _host() -> str:
    """The same for processes that can signal each other by their ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # nobody's neighbour


def _say(text: str) -> None:
    print(f"xla_fsdp: {text}", file=sys.stderr, flush=True)
