"""Observes what a rank is doing from another thread of its process."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import time
import traceback
from types import FrameType

import torch
import torch_xla
import torch_xla.debug.metrics as met

from ..cpu import call_site

# Syncs dispatched, compilations begun and ended, programs run.
_SYNCS, _COMPILING, _COMPILED, _PROGRAMS = (
    "MarkStep", "UncachedCompile", "CreateCompileHandles", "ExecuteComputation",
)  # fmt: skip
# The part of a core above which a process is compiling or computing.
_AT_WORK = 0.5
_INNERMOST, _CHARACTERS = 24, 6_000
_OTHER_THREADS, _ATTEMPTS = 8, 10
_READS_A_VALUE = re.compile(r"\.(item|cpu|tolist|numpy|to|sync|mark_step|rendezvous)\(")
_HERE = os.path.join(os.path.dirname(__file__), "")
_TORCH_XLA = os.path.join(torch_xla.__path__[0], "")
_DATA = (
    os.path.join(torch.__path__[0], "utils/data/"),
    os.path.join(_TORCH_XLA, "distributed/parallel_loader"),
)

#: Describes a rank that waits for its device, and so perhaps for other ranks.
DEVICE = "waiting for the device or other ranks"


class ProcessProgress:
    """The progress of this process, which two ranks in it share."""

    def __init__(self) -> None:
        self._counts: tuple[int, ...] = ()
        self._least = sys.maxsize  # compilations begun and not ended, while none was running
        self._since = self._processor = 0.0

    def look(self) -> tuple[int, float, str]:
        """Returns steps, seconds without progress, and ``"compiling"``, ``"computing"`` or ""."""
        counts = tuple(_counter(name) for name in (_SYNCS, _COMPILING, _COMPILED, _PROGRAMS))
        now, processor = time.monotonic(), time.process_time()
        if counts != self._counts:
            self._counts, self._since, self._processor = counts, now, processor
        # Some count no beginning, and failed ones no end.
        compiling = counts[1] - counts[2]
        self._least = min(self._least, compiling)
        idle = now - self._since
        work = ""
        if compiling > self._least:
            work = "compiling"
        elif processor - self._processor > _AT_WORK * idle:
            work = "computing"
        return counts[0], idle, work


def _counter(name: str) -> int:
    return met.counter_value(name) or 0


def doing(thread: int) -> tuple[str, str, str]:
    """What a thread is doing, its ``file:line`` in user code, and its stack."""
    calls = _calls(thread)
    if not calls:
        return "without a thread", "an unknown place", ""
    # Reads source files, but does not delay the rank.
    stack = traceback.StackSummary.extract(iter(calls), limit=_INNERMOST)
    stack.reverse()
    text = "".join(stack.format())[-_CHARACTERS:]
    names = {one.ident: one.name for one in threading.enumerate()}
    others = [
        f"  thread {names.get(ident, 'without a name')}: {call_site.of_frame(other)}\n"
        for ident, other in sys._current_frames().items()
        if ident != thread and not names.get(ident, "").startswith("xla_fsdp")
    ]
    return _what(calls), _where(calls), text + "".join(others[:_OTHER_THREADS])


def _calls(thread: int) -> list[tuple[FrameType, int]]:
    """Innermost first, up to the call of the rank's function."""
    calls: list[tuple[FrameType, int]] = []
    for _ in range(_ATTEMPTS):
        calls, frame = [], sys._current_frames().get(thread)
        while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            calls.append((frame, frame.f_lineno))
            frame = frame.f_back
        if frame is not None:  # else a call has returned meanwhile
            break
    return calls


def _where(calls: list[tuple[FrameType, int]]) -> str:
    users = (frame for frame, _ in calls if call_site.is_users(frame))
    return call_site.frame_text(next(users, calls[0][0]))


def _what(calls: list[tuple[FrameType, int]]) -> str:
    for number, (frame, line) in enumerate(calls):
        file = frame.f_code.co_filename
        if file.startswith(_DATA):
            return "waiting for data"
        if file.startswith(_TORCH_XLA):
            return DEVICE
        if os.path.basename(file) == "queue.py" or f"{os.sep}multiprocessing{os.sep}" in file:
            return "waiting at a queue"
        if call_site.is_users(frame):
            reads = number == 0 and _READS_A_VALUE.search(linecache.getline(file, line))
            return DEVICE if reads else "running"
    return "running"
