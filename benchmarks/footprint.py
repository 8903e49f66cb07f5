"""Memory of one lane, in a separate launch: ``python -m benchmarks.footprint LANE WORKLOAD``.

Buffers of XLA on CPU are ordinary host memory, so the peak resident size of the process (VmHWM,
reset after the first steps) includes every gathered parameter. ``environment`` makes the allocator
return freed memory immediately; otherwise freed memory would count. XLA dumps its programs in the
same run.
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
    """The environment variables with which the process must be started."""
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
        with turns:  # the in-tree checkpoint has its state in a global variable
            loss = lane.trace()  # kept over the sync: with one output less it is another program
        torch_xla.sync(wait=True)
        xm.rendezvous("step")
    if rank == 0:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    xm.rendezvous("reset")
    before = _kilobytes("VmRSS")
    for _ in range(STEPS):
        with turns:  # the in-tree checkpoint has its state in a global variable
            loss = lane.trace()  # kept over the sync: with one output less it is another program
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
