"""What one device attains: its memory, its matrix unit, its link to the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch_xla.core.xla_model as xm

from ..sharding.once import Tensors
from ..tpu.chips import Chip
from .records import Rate
from .timing import Stopwatch


@dataclass(frozen=True)
class Amounts:
    """How much is measured: bytes in memory, rows of matrices, bytes to and from the host."""

    memory: int
    rows: tuple[int, ...]
    transfer: int
    times: int


ON_TPU = Amounts(memory=256 << 20, rows=(1024, 4096, 8192), transfer=64 << 20, times=50)
ON_CPU = Amounts(memory=4 << 20, rows=(64, 256), transfer=4 << 20, times=4)


def rates(watch: Stopwatch, amounts: Amounts, chip: Chip | None) -> Iterator[Rate]:
    """Measures one after the other; call on every rank. ``chip``: whose figures are published."""
    memory = None if chip is None else chip.device_hbm_bandwidth
    peak = None if chip is None else chip.device_flops
    vector = watch.sent(torch.ones(amounts.memory // 4))
    factor = watch.sent(torch.tensor(1.0))
    seconds = watch.seconds(_scale, [vector], [factor], amounts.times)
    yield Rate("HBM, read and written", "B", 2 * amounts.memory, seconds, memory)
    for rows in amounts.rows:
        matrix = torch.randn(rows, rows, generator=torch.Generator().manual_seed(rows))
        held = watch.sent((matrix / rows**0.5).bfloat16())
        times = max(1, min(amounts.times, round(amounts.times * (4096 / rows) ** 2)))
        seconds = watch.seconds(_multiply, [held], [held], times)
        name = f"matrix product, {rows}, bfloat16"
        yield Rate(name, "FLOP", 2.0 * rows**3, seconds, peak)
    there = torch.ones(amounts.transfer // 4)
    best_out = best_back = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        here = watch.sent(there)
        xm.wait_device_ops([])
        best_out = min(best_out, time.perf_counter() - began)
        began = time.perf_counter()
        back = here.cpu()
        best_back = min(best_back, time.perf_counter() - began)
        if not torch.equal(back, there):
            raise RuntimeError("what came back from the device is not what was sent to it")
    yield Rate("host to device", "B", amounts.transfer, best_out)
    yield Rate("device to host", "B", amounts.transfer, best_back)


def _scale(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    return [carry[0] * constants[0]], []


def _multiply(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    return [carry[0] @ constants[0]], []
