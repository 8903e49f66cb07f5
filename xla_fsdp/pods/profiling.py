"""``profile``: records steps of a run as a trace for XProf, with names of units and collectives.

The names are those of a plan (``planning/tracing/naming.py``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as xp
import torch_xla.runtime as xr
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import xlac
from ..collectives.random_state import synced_device
from ..planning.tracing.naming import Naming
from ..ranks.rank import RankContext, current_rank


class profile:
    """Records steps of a training loop for TensorBoard's profile page.

    ::

        with xla_fsdp.profile("runs/trace", steps=(10, 13)) as profiler:
            for batch in loader:
                ...
                profiler.step()

    Enter it before the first step is traced, on every rank: programs that are compiled until the
    end of the recorded steps have names, such as ``forward[blocks.3.mlp]`` or ``all_gather[...]``.
    ``report.compare_trace(folder)`` compares a plan with the trace. Recording begins and ends with
    a wait for the device.

    Args:
        folder: a folder of TensorBoard; the trace is written to ``plugins/profile`` in it.
        steps: ``(a, b)``: records from step a up to, but without, step b; the first step is 0.
        ranks: the ranks that record their device. Each CPU rank records all ranks.

    Attributes:
        file: the trace, once it is written; ``None`` before, and on ranks that do not record.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RuntimeError: this process is already recording.
    """

    def __init__(
        self, folder: str | os.PathLike[str], steps: tuple[int, int], ranks: Collection[int] = (0,)
    ) -> None:
        first, last = _require_steps(steps)
        if not os.fspath(folder):
            raise ValueError("folder is empty; pass the path of a folder")
        if not isinstance(ranks, Collection):
            raise TypeError(f"ranks must be a tuple of numbers, such as (0,), got {ranks!r}")
        self.file: Path | None = None
        self._folder, self._first, self._last = os.fspath(folder), first, last
        self._ranks = ranks
        self._step = 0
        self._named = self._records = False
        self._event: Any = None

    def __enter__(self) -> profile:
        if self._first == 0:
            self._begin()
        _naming.turn_on()
        self._named = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # A run that ends before step b still writes its trace.
        self._end(settle=kind is None)

    def step(self) -> None:
        """Ends a step. Call it on every rank."""
        self._step += 1
        if not self._named:
            return
        _naming.close()
        if self._step == self._last:
            self._end()
        elif self._step == self._first:
            self._begin()
        elif self._records:
            self._next_event()

    def _begin(self) -> None:
        _wait_for_device()
        if xr.global_ordinal() in self._ranks:
            xp.start_trace(self._folder)
            self._records = True
            self._next_event()

    def _end(self, settle: bool = True) -> None:
        if not self._named:
            return
        if settle:
            _naming.close()
            _wait_for_device()
        self._named = False
        _naming.turn_off()
        if self._records:
            self._records = False
            self._end_event()
            before = _traces(self._folder)
            xp.stop_trace()
            written = sorted(_traces(self._folder) - before)
            self.file = written[-1] if written else None
            if settle:
                self._require_names()

    def _next_event(self) -> None:
        self._end_event()
        # "_r": the root of a step.
        self._event = xlac.TraceEvent("train", step_num=self._step, _r=1)
        self._event.__enter__()

    def _end_event(self) -> None:
        if self._event is not None:
            self._event.__exit__(None, None, None)
            self._event = None

    def _require_names(self) -> None:
        # The file also contains programs that ran earlier in this process.
        if self.file is None or b"forward[" in self.file.read_bytes():
            return
        warnings.warn(
            f"the trace {self.file} has no names of modules: the programs were compiled before "
            "xla_fsdp.profile was entered, or loaded from a compilation cache. Enter it before the "
            "first step, and run once without enable_compilation_cache",
            stacklevel=4,
        )


class _SharedNaming(Naming):
    """Names for ranks that are threads: hooks of modules are global."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self._lock = threading.Lock()
        # Those that want names; ``None``: this process is a rank.
        self._ranks: list[RankContext | None] = []
        self._hooks = contextlib.ExitStack()

    def turn_on(self) -> None:
        """Names what this rank traces, also in autograd's thread."""
        with self._lock:
            if not self._ranks:
                self._hooks.enter_context(self.active())
                self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
                self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
            self._ranks.append(current_rank())

    def turn_off(self) -> None:
        with self._lock:
            self._ranks.remove(current_rank())
            if not self._ranks:
                self._hooks.close()
                self.clear()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if current_rank() in self._ranks:
            super()._enter(module, inputs)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if current_rank() in self._ranks:
            self.enter("optimizer")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_in(None):
            self.leave()


_naming = _SharedNaming()


def _require_steps(steps: Any) -> tuple[int, int]:
    try:
        first, last = steps
    except (TypeError, ValueError) as error:
        raise TypeError(f"steps must be two numbers, (a, b), got {steps!r}") from error
    if any(isinstance(n, bool) or not isinstance(n, int) for n in (first, last)):
        raise TypeError(f"steps must be two integers, (a, b), got {steps!r}")
    if not 0 <= first < last:
        raise ValueError(f"steps must be (a, b) with 0 <= a < b, got {steps!r}")
    return first, last


def _wait_for_device() -> None:
    with synced_device():
        xm.wait_device_ops()


def _traces(folder: str) -> set[Path]:
    return set(Path(folder).glob("plugins/profile/*/*.xplane.pb"))
