"""Memory of one lane alone: ``python -m benchmarks.footprint LANE WORKLOAD``, a launch of its own.

Buffers of XLA on CPU are ordinary host memory, so the peak resident size of the process (VmHWM,
reset once warm) has every gathered parameter in it. The allocator is told to return what is freed
at once (``environment``), or freed memory would count. The same run has XLA dump its programs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path

import torch_xla
import torch_xla.core.xla_model as xm

import xla_fsdp

from .lanes import Lane, Workload

WARM_UP, STEPS = 3, 4


def environment(dump: Path) -> dict[str, str]:
    """What the process must be started with."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
    return {
        **os.environ,
        "XLA_FLAGS": flags.strip(),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }


def _rank(rank: int, name: str, work: Workload, turns: threading.Lock) -> dict:
    lane = Lane(name, work, rank)
    for _ in range(WARM_UP):
        with turns:  # the in-tree checkpoint keeps its state in a global of the process
            loss = lane.trace()  # kept over the sync: an output less is another program
        torch_xla.sync(wait=True)
        xm.rendezvous("step")
    if rank == 0:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    xm.rendezvous("reset")
    before = _kilobytes("VmRSS")
    for _ in range(STEPS):
        with turns:  # the in-tree checkpoint keeps its state in a global of the process
            loss = lane.trace()  # kept over the sync: an output less is another program
        torch_xla.sync(wait=True)
        xm.rendezvous("step")
    del loss
    return {"idle_rss_bytes": before * 1024, "peak_rss_bytes": _kilobytes("VmHWM") * 1024}


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def main() -> None:
    name, work = sys.argv[1], Workload(**json.loads(sys.argv[2]))
    results = xla_fsdp.launch(_rank, (name, work, threading.Lock()), num_devices=work.ranks)
    print(json.dumps(results[0]))


if __name__ == "__main__":
    main()
