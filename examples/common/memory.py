"""How much memory is in use: of the device where the runtime says, else of this process."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


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
