"""The one XLA runtime of this process with N CPU devices: its settings, start and state."""

from __future__ import annotations

import os
import threading

import torch
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.runtime as xr

from ... import xlac
from ...compiled.cache import refuse_removed_cache_variable
from ..autograd_thread import run_there
from ..rank import RankContext
from .operators import look_up_operators
from .session import drop_pending, wait_for_programs
from .start_gate import StartGate

# Both launching and simulating ranks change torch_xla's global state.
ONE_AT_A_TIME = threading.Lock()

MAX_RANKS = 8
DEFAULT_RANKS = 4


class CpuRuntime:
    """The runtime, started at most once in a process.

    Attributes:
        leftover: rank threads that a failed launch could not stop.
        unfinished: the ranks of the failed launch, whose collectives are still on the devices.
    """

    def __init__(self) -> None:
        self.leftover: list[threading.Thread] = []
        self.gate = StartGate()
        self.unfinished: list[RankContext] = []
        self._started_here = False

    def size_for(self, num_devices: int | None) -> int:
        """Raises ValueError or TypeError unless the number of ranks is 1 to 8."""
        if num_devices is not None:
            return _check_count(num_devices, "num_devices")
        if xlac.runtime_has_started():
            return _check_count(
                xr.addressable_device_count(), "the number of devices of the runtime"
            )
        text = os.environ.get("CPU_NUM_DEVICES")
        if text is None:
            return DEFAULT_RANKS
        if not text.isdecimal():
            raise ValueError(
                f"CPU_NUM_DEVICES must be a number from 1 to {MAX_RANKS}, got {text!r}; "
                "unset it or pass num_devices"
            )
        return _check_count(int(text), "CPU_NUM_DEVICES")

    def start(self, size: int) -> None:
        """Starts the runtime with ``size`` devices, or checks the one that is running.

        Raises RuntimeError if that has other devices or settings, ranks are stuck in it, or a
        backward ran before it started.
        """
        self.leftover = [thread for thread in self.leftover if thread.is_alive()]
        if self.leftover:
            names = ", ".join(sorted(thread.name for thread in self.leftover))
            raise RuntimeError(
                f"an earlier launch in this process failed and could not stop {names}, so its "
                "devices cannot be used again. Start a new process."
            )
        if self.unfinished:
            wait_for_programs(failed=True)
        drop_pending(self.unfinished)
        self.unfinished = []
        if size > 1:
            look_up_operators()
        settings = _cpu_environment(size)
        if not xlac.runtime_has_started():
            refuse_removed_cache_variable()
            os.environ.update(settings)
            self._started_here = True
        found = xr.addressable_device_count()
        if found != size:
            raise RuntimeError(
                f"launch needs {size} CPU devices, but this process's XLA runtime was already "
                f"started with {found}. It cannot be restarted: use num_devices={found}, or call "
                "launch in a new process before anything uses an XLA device (or set "
                f"CPU_NUM_DEVICES={size} before that)."
            )
        if not self._started_here:
            wrong = {k: v for k, v in settings.items() if os.environ.get(k) != v}
            if wrong:
                text = " ".join(f"{key}={value}" for key, value in wrong.items())
                raise RuntimeError(
                    "this process's XLA runtime was already started, without settings that ranks "
                    "on one CPU need (they would hang). Call launch before anything uses an "
                    f"XLA device, or start the process with {text}"
                )
        for device in torch_xla.devices():
            run_there(device, lambda: None)

    def wait_for_autograd_threads(self) -> None:
        """Waits until autograd's threads hold no Python object: else a process that ends may abort.

        ``backward`` returns before its thread has released them. The thread runs its tasks in
        order, so waiting for one more task is enough.
        """
        with torch.inference_mode(False), torch.enable_grad():
            for device in torch_xla.devices():
                anchor = torch.full((), 0.5, device="cpu").to(device)  # 0 and 1 would be constants
                (anchor.requires_grad_() * 1).backward()


def _cpu_environment(size: int) -> dict[str, str]:
    return {
        xenv.PJRT_DEVICE: "CPU",
        "CPU_NUM_DEVICES": str(size),
        # Each waiting collective blocks a thread of torch_xla's pool and of XLA's.
        "XLA_THREAD_POOL_SIZE": _at_least("XLA_THREAD_POOL_SIZE", 2 * size),
        "NPROC": _at_least("NPROC", 4 * size),
        # Freeing a donated buffer waits for its program while it holds the GIL: ranks deadlock.
        "XLA_ENABLE_PARAM_ALIASING": "0",
    }


def _at_least(name: str, minimum: int) -> str:
    text = os.environ.get(name, "")
    return text if text.isdecimal() and int(text) >= minimum else str(minimum)


def _check_count(count: int, name: str) -> int:
    allowed = f"an int from 1 to {MAX_RANKS}"
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be {allowed} on CPU, got {count!r}")
    if not 1 <= count <= MAX_RANKS:
        raise ValueError(f"{name} must be {allowed} on CPU, got {count!r}")
    return count
