"""Host time of a step as on a TPU: no launch, no ranks as threads, nothing compiled or run.

``python -m benchmarks.tracing WORKLOAD STEPS`` simulates rank 0 of the workload's ranks: one
device, the real sharding groups, and the collectives of torch_xla, as in a process on a pod. Steps
are traced but never synced, so no other rank is needed; the lanes take turns, one step each. Inside
a launch on CPU, every torch call also goes through the launch's function mode, and the collectives
of ``xm`` through replacements. Neither exists on a TPU, and they slow down a class that runs more
Python more.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

UNCOUNTED = 2  # the first steps create optimizer state and have one-time costs


def main() -> None:
    os.environ["PJRT_DEVICE"] = "CPU"
    # Otherwise torch_xla omits collectives, since there is only one device.
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
    from .lanes import IN_TREE, OURS, UNWRAPPED, Lane, Workload

    work, steps = Workload(**json.loads(sys.argv[1])), int(sys.argv[2])
    lanes = [Lane(name, work, 0, simulated=True) for name in (OURS, IN_TREE, UNWRAPPED)]
    samples: dict[str, list[tuple[float, float]]] = {lane.name: [] for lane in lanes}
    for number in range(UNCOUNTED + steps):
        for lane in lanes if number % 2 == 0 else reversed(lanes):
            wall, cpu = time.perf_counter(), time.process_time()
            lane.trace()
            pair = time.perf_counter() - wall, time.process_time() - cpu
            if number >= UNCOUNTED:
                samples[lane.name].append(pair)
    figures = {
        name: {
            "trace_wall_ms": 1e3 * statistics.median(wall for wall, _ in pairs),
            "trace_ms": 1e3 * statistics.median(cpu for _, cpu in pairs),
        }
        for name, pairs in samples.items()
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # the traced graph must not run, and freeing it takes time


if __name__ == "__main__":
    main()
