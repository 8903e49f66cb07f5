"""Finds the rank that holds up the others, where ranks are processes, and says what each one does.

Every rank's own thread leaves a sign of life in the ranks' store now and then: what the rank waits
for, or where it runs. It works while the rank hangs in a collective, in reading data or in any
other wait. The first two ranks read all signs; what they find ends every rank, with one report.

Threads that hold the interpreter's lock for ever, and stopped processes, leave no signs: they are
found by that, and another rank of their host asks for their stacks by a signal that Python's
``faulthandler`` answers in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .channel import Channel, open_channel
from .cpu import call_site
from .waits import compiling, of_this_process

# A program that takes longer is one that will never be done.
_LONGEST_COMPILE = 3600.0
_SECONDS_BETWEEN_SIGNS = 5.0
_SECONDS_FOR_STACKS = 10.0
_WATCHERS = 2  # one of them may be what hangs


class Watchdog:
    """One rank's part.

    Args:
        channel: of all ranks, for this alone.
        timeout: seconds that a rank may keep others waiting.
        end: called with the report, on a thread of this object, to end the rank's process.
    """

    def __init__(self, channel: Channel, timeout: float, end: Callable[[str], object]) -> None:
        self._channel, self._timeout, self._end = channel, timeout, end
        self._period = min(_SECONDS_BETWEEN_SIGNS, timeout / 8)
        self._thread = threading.get_ident()
        self._waits = of_this_process
        self._over = threading.Event()
        self._file: Path | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # number of a sign, when it was new here

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, this thread's rank is watched, and watches."""
        with self._waits.noted(), _stacks_on_signal() as self._file:
            name = f"xla_fsdp-watchdog-{self._channel.rank}"
            watching = threading.Thread(target=self._run, name=name, daemon=True)
            watching.start()
            try:
                yield
            finally:
                self._over.set()
                watching.join(timeout=1.0)
                with contextlib.suppress(RuntimeError):  # the store is gone: so is everybody
                    self._sign(-1, "its function returned")

    def _run(self) -> None:
        store, number = self._channel.store, 0
        began = time.monotonic()
        try:
            while not self._over.wait(self._period):
                number += 1
                self._sign(number)
                if store.check(["hang"]):
                    self._tell_and_end()
                elif self._channel.rank < _WATCHERS:
                    found = self._look(began)
                    if found is not None:
                        store.compare_set("hang", "", json.dumps([self._channel.rank, found]))
        except RuntimeError:
            return  # the store is gone, with the process that served it: that one ends all

    def _sign(self, number: int, over: str = "") -> None:
        wait, now = self._waits.of(self._thread), time.monotonic()
        sign = {
            "number": number,
            "over": over,
            "what": wait and wait.what,
            "where": wait.where if wait else call_site.of_thread(self._thread),
            "seconds": now - wait.since if wait else 0.0,
            "compiling": not over and compiling(),
            "passed": self._waits.passed(self._thread),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "file": str(self._file or ""),
        }
        self._channel.store.set(f"sign/{self._channel.rank}", json.dumps(sign))

    def _signs(self) -> dict[int, dict[str, Any]]:
        """By rank, of those that have left any; with the seconds since the last one."""
        store, now = self._channel.store, time.monotonic()
        keys = {rank: f"sign/{rank}" for rank in range(self._channel.size)}
        if not store.check(list(keys.values())):  # some have not started
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        found = {}
        # In one request: a pod has thousands of ranks.
        texts = store.multi_get(list(keys.values())) if keys else []  # type: ignore[attr-defined]
        for rank, text in zip(keys, texts, strict=True):
            sign = json.loads(text)
            if self._seen.get(rank, (None,))[0] != sign["number"]:
                self._seen[rank] = (sign["number"], now)
            sign["silent"] = 0.0 if sign["over"] else now - self._seen[rank][1]
            found[rank] = sign
        return found

    def _look(self, began: float) -> str | None:
        """What is wrong, if anything is."""
        signs = self._signs()
        busy = any(
            sign["compiling"] and sign["seconds"] < _LONGEST_COMPILE for sign in signs.values()
        )
        longest = max((sign["seconds"] for sign in signs.values() if not sign["over"]), default=0.0)
        if longest > self._timeout and not busy:
            return (
                f"ranks have waited for {self._timeout:g} s (the timeout given to launch) for one "
                "that did not come"
            )
        # Signs are late where a machine is busy; silence is what lasts.
        silent = [rank for rank, sign in signs.items() if sign["silent"] > self._timeout]
        if silent:
            return f"{_ranks(silent)} gave no sign of life for {self._timeout:g} s"
        missing = [rank for rank in range(self._channel.size) if rank not in signs]
        if missing and time.monotonic() - began > max(self._timeout, _LONGEST_COMPILE):
            return f"{_ranks(missing)} never started"
        return None

    def _tell_and_end(self) -> None:
        store, rank = self._channel.store, self._channel.rank
        winner, found = json.loads(store.get("hang"))
        store.set(f"stacks/{rank}", _own_stacks())
        if rank != winner:
            until = time.monotonic() + 3 * _SECONDS_FOR_STACKS
            while not store.check(["report"]) and time.monotonic() < until:
                time.sleep(0.1)
            self._end(store.get("report").decode() if store.check(["report"]) else found)
            return
        until = time.monotonic() + _SECONDS_FOR_STACKS
        everybody = range(self._channel.size)
        signs = self._signs()
        alive = [r for r in everybody if r in signs and signs[r]["silent"] <= 3 * self._period]
        wanted = [f"stacks/{r}" for r in alive if not signs[r]["over"]]
        while not store.check(wanted) and time.monotonic() < until:
            time.sleep(0.1)
        stacks = {}
        for other in everybody:
            if store.check([f"stacks/{other}"]):
                stacks[other] = store.get(f"stacks/{other}").decode()
            elif other in signs and not signs[other]["over"]:
                stacks[other] = _ask_for_stacks(signs[other])
        report = f"{found}:\n{self._places(signs)}\n\n{_grouped(stacks)}"
        store.set("report", report)
        self._end(report)

    def _places(self, signs: dict[int, dict[str, Any]]) -> str:
        lines = []
        for rank in range(self._channel.size):
            sign = signs.get(rank)
            if sign is None:
                lines.append(f"  rank {rank}: has not started")
                continue
            if sign["over"]:
                text = sign["over"]
            elif sign["what"]:
                doing = ", compiling" if sign["compiling"] else ""
                text = f"{sign['what']}, at {sign['where']}, for {sign['seconds']:.0f} s{doing}"
            else:
                text = f"running, at {sign['where']}"
            if sign["silent"] > 3 * self._period:
                text += f"; no sign of life for {sign['silent']:.0f} s"
            lines.append(f"  rank {rank}: {text} (after {sign['passed']} waits)")
        return "\n".join(lines)


@contextlib.contextmanager
def watched(timeout: float, end: Callable[[str], object]) -> Iterator[None]:
    """Within, the calling thread's rank is watched, if ranks can tell each other anything."""
    with contextlib.ExitStack() as stack:
        if timeout != float("inf"):
            try:
                channel = open_channel("watchdog")
            except RuntimeError as error:
                warnings.warn(f"a rank that hangs will not be found: {error}", stacklevel=2)
            else:
                if channel.size > 1:
                    stack.enter_context(Watchdog(channel, timeout, end).watching())
        yield


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != own:
            text = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, 'unknown')}:\n{text}")
    return "\n".join(sorted(parts))


@contextlib.contextmanager
def _stacks_on_signal() -> Iterator[Path | None]:
    """A file that gets the stacks of this process at SIGUSR1, unless somebody else uses that."""
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield None
        return
    with tempfile.NamedTemporaryFile("w", prefix="xla_fsdp-stacks-") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            yield Path(file.name)
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _ask_for_stacks(sign: dict[str, Any]) -> str:
    if sign["host"] != socket.gethostname() or not sign["file"]:
        return f"no answer from process {sign['process']} on {sign['host']}\n"
    try:
        os.kill(sign["process"], signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            text = Path(sign["file"]).read_text(errors="replace")
            if text:
                return text
    except OSError as error:
        return f"process {sign['process']} is gone ({error.strerror})\n"
    return f"process {sign['process']} does not react to signals: it is stopped, or in the kernel\n"


def _grouped(stacks: dict[int, str]) -> str:
    """Ranks that do the same share a stack: a pod has thousands."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        groups.setdefault(text, []).append(rank)
    parts = [f"Stacks of {_ranks(ranks)}:\n{text}" for text, ranks in groups.items()]
    return "\n".join(sorted(parts, key=lambda part: len(part)))


def _ranks(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
