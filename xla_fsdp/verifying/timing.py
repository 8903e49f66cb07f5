"""How long something takes on the device, without the time that it takes to ask for it.

What is measured runs in a loop of the compiled program, so that tracing and starting a program
count once however often it runs; a program of nothing says how much they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from ..collectives.host_data import as_data
from ..scan.loop import Body, loop

REPEATS = 4


class Stopwatch:
    """Times loops on this rank's device; call its methods on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counter: dict[int, torch.Tensor] = {}
        # Seconds to start a program and wait for it.
        self.overhead = 0.0
        one = self.sent(torch.ones(8))
        self.overhead = min(self._run(lambda: [one + 1.0]) for _ in range(2 + REPEATS))

    def sent(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` on the device, as data of programs and not a constant in them."""
        return as_data(value, self._device)

    def seconds(
        self,
        body: Body,
        carry: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
        times: int,
    ) -> float:
        """Of one execution of ``body``, which hands its carry on; the least of a few runs."""
        if times not in self._counter:
            self._counter[times] = self.sent(torch.zeros(times))
        counter = self._counter[times]

        def start() -> Sequence[torch.Tensor]:
            return loop(body, carry, [counter], constants, self._device)[0]

        self._run(start)  # compiles
        best = min(self._run(start) for _ in range(REPEATS))
        return max(best - self.overhead, 1e-9) / times

    def _run(self, start: object) -> float:
        xm.wait_device_ops([])
        results = start()  # type: ignore[operator]
        began = time.perf_counter()
        torch_xla.sync(wait=True)
        xm.wait_device_ops([])
        took = time.perf_counter() - began
        del results
        return took
