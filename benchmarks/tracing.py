"""Host time a step as on a TPU: no launch, no ranks as threads, nothing compiled or run.

``python -m benchmarks.tracing WORKLOAD ROUNDS`` pretends to be rank 0 of the workload's ranks: one
device, the true sharding groups, and torch_xla's own collectives, as in a process on a pod. Steps
are traced one on top of the other and never synced, so they need no other rank. Inside a launch on
CPU every torch call also goes through the launch's function mode, and ``xm``'s collectives through
its replacements; neither exists on a TPU, and they cost a class more the more Python it runs.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time

STEPS = 3


def _forget_traced() -> None:
    # The next lane's construction syncs: it would compile and run what was only to be traced.
    import torch_xla

    gc.collect()
    device = str(torch_xla.device())
    torch_xla._XLAC._set_all_reduce_token(device, None)
    torch_xla._XLAC._clear_pending_irs(device)


def main() -> None:
    os.environ["PJRT_DEVICE"] = "CPU"
    # Otherwise torch_xla leaves collectives out, there being one device.
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
    from .lanes import IN_TREE, OURS, UNWRAPPED, Lane, Workload

    work, rounds = Workload(**json.loads(sys.argv[1])), int(sys.argv[2])
    samples: dict[str, list[tuple[float, float]]] = {OURS: [], IN_TREE: [], UNWRAPPED: []}
    for number in range(rounds + 1):
        names = list(samples) if number % 2 == 0 else list(reversed(samples))
        for name in names:
            lane = Lane(name, work, 0, pretend=True)
            lane.trace()  # creates the optimizer's state
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                lane.trace()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            del lane
            _forget_traced()
            if number > 0:  # the first round pays for imports and first uses
                samples[name].append((1e3 * wall / STEPS, 1e3 * cpu / STEPS))
    print(json.dumps({
        name: {
            "trace_wall_ms": statistics.median(wall for wall, _ in pairs),
            "trace_ms": statistics.median(cpu for _, cpu in pairs),
        }
        for name, pairs in samples.items()
    }))  # fmt: skip


if __name__ == "__main__":
    main()
