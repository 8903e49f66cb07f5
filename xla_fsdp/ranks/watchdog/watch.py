"""The watchdog thread of each rank."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch_xla.runtime as xr

from ...wording import first_line
from .. import spawned
from ..channel import open_channel
from ..cpu.call_site import is_library
from ..errors import RankTimeoutError
from ..slices import slices_of_ranks
from .hang_report import RankStatus, hang_text
from .waits import ProcessProgress, doing
from .watch_settings import WatchSettings, log_line, watch_settings

# No library uses it by default. Only sent to processes that handle it.
_SIGNAL = signal.SIGRTMAX - 7
_MEMORY_FILE = "xla_fsdp-stacks"
_CHARACTERS = 6_000
_SECONDS_TO_DUMP = 0.3
_STACKS_OF_SILENT_RANKS = 32


def watched(fn: Callable, timeout: float) -> Callable:
    """Wraps ``fn`` so that its ranks are watched; can be pickled if ``fn`` can."""
    chosen = watch_settings(timeout)
    return fn if chosen is None else partial(_run_watched, fn, chosen)


def _run_watched(fn: Callable, chosen: WatchSettings, rank: int, *args: Any) -> Any:
    with _Watch(chosen).around():
        return fn(rank, *args)


class _Watch:
    """The watchdog of one rank, created on the rank's thread.

    All ranks read the lease of the rank on duty: its rank, a counter, its last request for stacks,
    the processes that did not answer, and why all ranks must end, if so.
    """

    _store: Any

    def __init__(self, chosen: WatchSettings) -> None:
        # On v2 and v3 only this thread knows its rank.
        self._rank, self._size = xr.global_ordinal(), xr.world_size()
        self._slices = slices_of_ranks()
        self._settings = chosen
        self._thread = threading.get_ident()
        self._process: dict[str, Any] = {}
        self._progress = ProcessProgress()
        self._beats = 0
        self._ended = ""
        self._over = threading.Event()
        self._lease = ""  # the last one read
        self._lease_since = time.monotonic()
        self._answered = 0
        self._helped: set[str] = set()
        # While on duty.
        self._own_lease = ""
        self._duty: dict[str, Any] = {
            "by": self._rank, "number": 0, "ask": 0, "silent": {}, "end": "", "named": None
        }  # fmt: skip
        self._seen: dict[int, tuple[int, float]] = {}  # last beat and its time, by rank
        self._asked_at: float | None = None
        self._reported_at: float | None = None
        self._beater = threading.Thread(
            target=self._run, name=f"xla_fsdp-watchdog-{self._rank}", daemon=True
        )

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Afterwards no rank waits for this one."""
        self._beater.start()
        try:
            yield
            self._ended = "its function returned"
        except BaseException as error:
            self._ended = f"raised {type(error).__name__}"
            if isinstance(error, SystemExit):
                self._ended = f"ended with exit code {error.code!s:.100}"
            with contextlib.suppress(Exception):  # __str__ may raise
                self._ended += f": {error!s:.300}" if isinstance(error, Exception) else ""
            raise
        finally:
            self._over.set()
            self._beater.join(1.0)  # the store may hang

    def _run(self) -> None:
        try:
            self._process = _prepare_dump(self._thread)
            # On this thread, because the store may be slow to answer.
            channel = open_channel("watchdog", (self._rank, self._size))
        except (RuntimeError, OSError) as error:
            log_line(f"no watchdog for rank {self._rank}, so a hang is not reported: {error}")
            return
        self._store = channel.store
        try:
            self._beat()
            self._store.append("roster", f"{self._rank} ")
            while not self._over.is_set():
                self._listen()
                self._over.wait(self._settings.beat)
                self._beat()
        except RuntimeError as error:
            if not self._over.is_set():
                self._alone(str(error))

    def _beat(self) -> None:
        self._beats += 1
        steps, idle, work = self._progress.look()
        sign = {"beat": self._beats, "steps": steps, "idle": idle, "work": work}
        sign |= {"ended": self._ended, "process": self._process}
        self._store.set(f"sign/{self._rank}", json.dumps(sign))

    def _listen(self) -> None:
        now = time.monotonic()
        self._duty["number"] += 1
        expected, own = self._own_lease, json.dumps(self._duty)
        if not expected and now - self._lease_since > 2 * self._settings.to_answer:
            expected = self._lease  # the rank on duty is silent: take its place
        current = self._store.compare_set("watcher", expected, own).decode()
        if current != self._lease:
            self._lease, self._lease_since = current, now
        lease = json.loads(current)
        self._own_lease = own if current == own else ""
        if not self._own_lease:
            self._duty |= {"ask": lease["ask"], "silent": {}}
            self._asked_at = self._reported_at = None
        if lease["ask"] > self._answered:
            self._answered = lease["ask"]
            self._helped.clear()
            self._answer(lease["ask"], self._rank, *doing(self._thread))
        for rank, process in lease["silent"].items():
            if rank not in self._helped and process["host"] == self._process["host"]:
                self._helped.add(rank)
                if int(rank) != self._rank:
                    self._answer(lease["ask"], int(rank), "", *_stack_of(process))
        if lease["end"]:
            # Every rank must read it: the store may end with the first process.
            time.sleep(self._settings.to_answer)
            spawned.fail(self._rank, RankTimeoutError(lease["end"], lease["named"]))
        if current == own:
            self._check_all()

    def _answer(self, ask: int, rank: int, what: str, where: str, stack: str) -> None:
        self._store.append(f"answers/{ask}", json.dumps([rank, what, where, stack]) + "\n")

    def _check_all(self) -> None:
        now = time.monotonic()
        signs = self._signs(now)
        quiet = {rank: now - self._seen[rank][1] for rank in signs}
        running = [rank for rank, sign in signs.items() if not sign["ended"]]
        if not running:
            return
        idle = min(signs[rank]["idle"] + quiet[rank] for rank in running)
        # A silent rank may not be working.
        there = [rank for rank in running if quiet[rank] < self._settings.to_answer]
        work = any(signs[rank]["work"] for rank in there)
        steps = max(sign["steps"] for sign in signs.values())
        if idle < self._settings.timeout / 2:
            if self._reported_at is not None:
                log_line(
                    f"ranks make progress again, {now - self._reported_at:.0f} s after the report"
                )
            self._asked_at = self._reported_at = None
            self._duty["silent"] = {}
        elif self._asked_at is not None:
            self._collect(now, idle, signs, quiet)
        elif self._reported_at is None and idle > self._settings.patience(steps, work):
            self._duty["ask"] += 1
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
        assert self._asked_at is not None
        key = f"answers/{self._duty['ask']}"
        lines = self._store.get(key).splitlines() if self._store.check([key]) else []
        answers = {rank: answer for rank, *answer in map(json.loads, lines)}
        missing = [r for r, sign in signs.items() if not sign["ended"] and r not in answers]
        if missing and now - self._asked_at < self._settings.to_answer:
            return
        if missing and not self._duty["silent"]:
            some = missing[:_STACKS_OF_SILENT_RANKS]
            self._duty["silent"] = {rank: signs[rank]["process"] for rank in some}
            self._asked_at = now
            return
        self._store.delete_key(key)
        places = []
        for rank, sign in signs.items():
            what, where, stack = answers.get(rank, ("", "", ""))
            silent = not sign["ended"] and not what  # another process may answer
            places.append(RankStatus(
                rank, sign["steps"], quiet[rank] if silent else 0.0,
                sign["ended"] or _describe_wait(what, sign["work"]), where, stack,
                bool(sign["ended"]), sign["process"]["name"],
            ))  # fmt: skip
        head, text, named = hang_text(places, idle, self._settings.timeout, self._slices)
        log_line(f"{head}\n{text}")
        self._asked_at, self._reported_at, self._duty["silent"] = None, now, {}
        if self._settings.end:
            self._duty["end"] = f"{head}. All stacks are in the output of rank {self._rank}"
            self._duty["named"] = named[0].rank if len(named) == 1 else None

    def _alone(self, why: str) -> None:
        """Watches only this rank, after the store was lost."""
        while not self._over.wait(self._settings.beat):
            steps, idle, work = self._progress.look()
            if idle > self._settings.patience(steps, bool(work)):
                what, where, stack = doing(self._thread)
                head = (
                    f"rank {self._rank} has made no progress for {idle:.0f} s. The other ranks are "
                    "unknown, because the process that launched the ranks of the first host, and "
                    f"with it the store, does not answer ({first_line(why, 200)})"
                )
                log_line(f"{head}\n  rank {self._rank}: {what}, at {where}\n{stack}")
                if self._settings.end:
                    spawned.fail(self._rank, RankTimeoutError(head))
                return


def _describe_wait(what: str, work: str) -> str:
    if work == "compiling":
        return "compiling"
    return f"{what}, and its process computes" if work and what else what


def _prepare_dump(thread: int) -> dict[str, Any]:
    """Lets processes of this host get a thread's stack, until the process ends."""
    faulthandler.register(_SIGNAL, os.memfd_create(_MEMORY_FILE), all_threads=True)
    return {
        "name": f"process {os.getpid()} of {socket.gethostname()}",
        "host": _host_identity(),
        "pid": os.getpid(),
        "thread": f"{thread:#018x}",  # as faulthandler writes it
    }


def _stack_of(process: dict[str, Any]) -> tuple[str, str]:
    """``file:line`` and stack, innermost call first, or why there is none."""
    folder = f"/proc/{process['pid']}/fd"
    try:
        links = [f"{folder}/{name}" for name in os.listdir(folder)]
        # faulthandler writes only into the last file of a process.
        files = [link for link in links if f"/memfd:{_MEMORY_FILE}" in os.path.realpath(link)]
        if not files or not _handles_it(process["pid"]):
            return "", "  its process has ended\n"  # the id was reused
        os.kill(process["pid"], _SIGNAL)
        time.sleep(_SECONDS_TO_DUMP)
        text = "\n".join(Path(file).read_text(errors="replace") for file in files)
    except (FileNotFoundError, ProcessLookupError):
        return "", "  its process has ended\n"
    except OSError as error:
        return "", f"  its process cannot be signalled ({error})\n"
    return _own_part(text, process["thread"])


def _own_part(text: str, thread: str) -> tuple[str, str]:
    threads = re.split(r"\n(?=Thread 0x|Current thread 0x)", text)
    own = [one for one in threads if thread in one.partition("\n")[0]]
    if not own:
        return "", "  no stack\n"
    where, lines = "", ["  most recent call first:\n"]
    for line in own[-1].splitlines()[1:]:
        found = re.fullmatch(r'  File "(.*)", line (\d+) in (.*)', line)
        if found and os.path.dirname(found[1]) == os.path.dirname(__file__):
            break  # the call of the rank's function
        if found and not where and not is_library(found[1]):
            where = f"{found[1]}:{found[2]} in {found[3]}"
        lines.append(f"{line}\n")
    return where, "".join(lines)[:_CHARACTERS]


def _handles_it(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def _host_identity() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # shares a host with no other process
