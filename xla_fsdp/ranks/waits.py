"""What a rank that is a process waits for: noted around everything that waits for a device.

On CPU ranks all these go through a session, which knows (``ranks/cpu``). Here nothing is changed
but that a note is left before, and taken away after.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.debug.metrics as met

from .cpu import call_site
from .cpu.patches import Patches

# Functions of torch_xla and methods of tensors, and as what users know them.
_OF_TORCH_XLA = {
    "_xla_step_marker": "torch_xla.sync()",
    "_xla_sync_multi": "a sync of some tensors",
    "_xla_get_cpu_tensors": "a copy of tensors to the host",
    "_xla_wait_device_ops": "xm.wait_device_ops()",
}
_OF_TENSORS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__")


class Wait(NamedTuple):
    """``what`` is waited for, at ``where`` in the user's code, since ``since`` (monotonic)."""

    what: str
    where: str
    since: float


class Waits:
    """Those of the threads of this process, of which each may be a rank's."""

    def __init__(self) -> None:
        self._now: dict[int, Wait] = {}
        self._passed: dict[int, int] = {}
        self._lock = threading.Lock()
        self._users = 0
        self._patches = Patches()

    def of(self, thread: int) -> Wait | None:
        """What a thread waits for now."""
        return self._now.get(thread)

    def passed(self, thread: int) -> int:
        """How many waits of a thread are over."""
        return self._passed.get(thread, 0)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, waits are noted."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._patches.undo()

    def _install(self) -> None:
        for name, what in _OF_TORCH_XLA.items():
            original = getattr(torch_xla._XLAC, name)
            self._patches.set(torch_xla._XLAC, name, self._noting(original, what))
        for name in _OF_TENSORS:
            method = getattr(torch.Tensor, name)
            what = f"a read of a tensor's value ({name})"
            self._patches.set(torch.Tensor, name, self._noting(method, what, tensors=True))

    def _noting(self, function: Callable, what: str, tensors: bool = False) -> Callable:
        now, passed = self._now, self._passed

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            me = threading.get_ident()
            # One within another is the other's; a tensor on the host is read at once.
            if me in now or (tensors and not args[0].is_xla):
                return function(*args, **kwargs)
            now[me] = Wait(what, call_site.here(), time.monotonic())
            try:
                return function(*args, **kwargs)
            finally:
                del now[me]
                passed[me] = passed.get(me, 0) + 1

        return noting


# Of the process by nature: what it patches is.
of_this_process = Waits()


def compiling() -> bool:
    """Whether XLA compiles a program now: counted when it begins, and measured when it is over."""
    begun = met.counter_value("UncachedCompile") or 0
    measured = met.metric_data("CompileTime")
    return begun > (measured[0] if measured else 0)
