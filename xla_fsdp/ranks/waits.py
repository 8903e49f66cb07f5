"""What a rank is doing, seen from another thread of its process: nothing is added to a step."""

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

from .cpu import call_site

# Counters of torch_xla. The second begins a compilation and the third ends one; the first moves
# when a sync has handed its program to the device, which is before the program ends.
_SYNCS, _COMPILING, _COMPILED, _PROGRAMS = (
    "MarkStep", "UncachedCompile", "CreateCompileHandles", "ExecuteComputation",
)  # fmt: skip
# A process that uses more of a core than this is at work: compiling, or computing on the host.
_AT_WORK = 0.5
_INNERMOST, _CHARACTERS = 24, 6_000
_OTHER_THREADS = 8
_READS_A_VALUE = re.compile(r"\.(item|cpu|tolist|numpy|to|sync|mark_step|rendezvous)\(")
_DATA = tuple(
    os.path.dirname(package.__file__) + part
    for package, part in ((torch, "/utils/data/"), (torch_xla, "/distributed/parallel_loader"))
)
_TORCH_XLA = os.path.dirname(torch_xla.__file__) + os.sep


class Progress:
    """How far this process is. Two ranks in it are as far as they are together."""

    def __init__(self) -> None:
        self._counts: tuple[int, ...] = ()
        self._least = sys.maxsize  # compilations begun and not ended, when there was none
        self._since = self._processor = 0.0

    def look(self) -> tuple[int, float, str]:
        """How many steps it has run, for how many seconds nothing has moved, and what it is at work
        on meanwhile: ``"compiling"``, ``"computing"`` on the host, or ``""``."""
        counts = tuple(_counter(name) for name in (_SYNCS, _COMPILING, _COMPILED, _PROGRAMS))
        now, processor = time.monotonic(), time.process_time()
        if counts != self._counts:
            self._counts, self._since, self._processor = counts, now, processor
        # Programs that are compiled in other ways have no beginning, one that fails has no end.
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
    return torch_xla._XLAC._xla_counter_value(name) or 0


def doing(thread: int) -> tuple[str, str, str]:
    """What the thread with this ident is doing, its ``file:line`` in user code, and its stack, with
    the innermost call of other threads below; at most some 7,000 characters."""
    frames = sys._current_frames()
    frame = frames.get(thread)
    if frame is None:
        return "has no thread any more", "an unknown place", ""
    # Sources are read from disk by another thread than that of the rank, so they may be.
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_INNERMOST)
    stack.reverse()
    text = "".join(stack.format())[-_CHARACTERS:]
    names = {one.ident: one.name for one in threading.enumerate()}
    others = [
        f"  thread {names.get(ident, 'without a name')}: {call_site.of_frame(other)}\n"
        for ident, other in frames.items()
        if ident != thread and not names.get(ident, "").startswith("xla_fsdp")
    ]
    return _what(frame), call_site.of_frame(frame), text + "".join(others[:_OTHER_THREADS])


def _what(frame: FrameType) -> str:
    inner: FrameType | None = frame
    while inner is not None and call_site.is_library(inner.f_code.co_filename):
        file = inner.f_code.co_filename
        if file.startswith(_DATA):
            return "waits for data"
        if file.startswith(_TORCH_XLA):
            return DEVICE
        if os.path.basename(file) == "queue.py" or f"{os.sep}multiprocessing{os.sep}" in file:
            return "waits at a queue"
        inner = inner.f_back
    if inner is not None:
        line = linecache.getline(inner.f_code.co_filename, inner.f_lineno)
        if inner is frame and _READS_A_VALUE.search(line):
            return DEVICE
    return "runs"


#: What a rank does that waits for its device, and so perhaps for other ranks.
DEVICE = "waits for the device or other ranks"
