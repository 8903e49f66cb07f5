"""How much memory is in use: of the device where the runtime says, else of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .script import Stop

GIB = 1 << 30
# Of float32: the weight, its gradient, and two states of Adam.
BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Memory:
    """``used`` bytes, of ``limit`` if known; ``where``: ``HBM`` or ``host``."""

    used: int
    limit: int | None
    where: str

    def __str__(self) -> str:
        of = f" of {self.limit / GIB:.1f}" if self.limit else ""
        return f"{self.where} {self.used / GIB:.1f}{of} GiB"


def memory_in_use() -> Memory:
    """Of the device of this rank now; on CPU ranks, which share a process, of that process."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    try:
        found = xm.get_memory_info(str(torch_xla.device()))
    except RuntimeError:
        # XLA's CPU client does not count.
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        import resource

        return Memory(pages * resource.getpagesize(), None, "host")
    return Memory(found["bytes_used"], found["bytes_limit"], "HBM")


def require_for_building(parameters: int) -> None:
    """Refuses a model that is too large for the memory of this machine before it is sharded.

    Raises:
        Stop: with code 2.
    """
    needed, there = parameters * 4, _memory_of_the_machine()  # float32
    if needed > there:
        raise Stop(
            f"{parameters:,} parameters take {needed / GIB:,.0f} GiB before they are sharded, the "
            f"machine has {there / GIB:,.0f} GiB: choose a smaller model or --num_classes",
            code=2,
        )


def require_for_training(parameters: int, flags: str) -> None:
    """Refuses a model that no CPU ranks could train: the system would end them without a word.

    Args:
        parameters: of all ranks, which share this machine's memory.
        flags: what makes the model smaller.

    Raises:
        Stop: with code 2.
    """
    import xla_fsdp

    xla_fsdp.compilation_counts()  # imports torch_xla, without its word about the CPU
    import torch_xla.runtime as xr

    if xr.device_type() != "CPU":
        return
    needed, there = parameters * BYTES_PER_PARAMETER, _memory_of_the_machine()
    if needed > there:
        raise Stop(
            f"{parameters:,} parameters take {needed / GIB:,.0f} GiB with gradients and optimizer "
            f"on CPU ranks, the machine has {there / GIB:,.0f} GiB: choose a smaller {flags}, a "
            "TPU, or --plan=SLICE to see what that needs",
            code=2,
        )


def _memory_of_the_machine() -> int:
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(found, int(file.read()))
    except (OSError, ValueError):  # no container, or one without a limit
        return found
