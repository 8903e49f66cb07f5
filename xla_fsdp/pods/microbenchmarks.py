"""Measures the parts of a step: memory, matmuls, the link to the host, collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from ..collectives.host_data import as_data
from ..collectives.world import World
from ..scan.loop import Body, loop
from ..sharding.trace_cache import Tensors
from ..tpu.chips import Chip
from ..tpu.links import OneCollective, collective_seconds
from ..tpu.slices import Groups
from ..tpu.topology import Slice
from .measurements import CollectiveTime, Rate

# Bytes, rounded down to float32 elements for each rank.
SIZES_ON_TPU = tuple(1 << n for n in (13, 17, 20, 24, 26))
SIZES_ON_CPU = tuple(1 << n for n in (13, 17))
_SHORTEST = 20e-6  # seconds of a collective if there is no model
_LONG = 20e-3  # seconds of a loop
_MOST_TIMES = 400
_REPEATS = 4


class Stopwatch:
    """Measures loops in one compiled program; call its methods on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Seconds to start and await a program.
        self.overhead = 0.0
        one = self.sent(torch.ones(8))
        self.overhead = min(self._run(lambda: [one + 1.0]) for _ in range(2 + _REPEATS))

    def sent(self, value: torch.Tensor) -> torch.Tensor:
        """Puts ``value`` on the device as data of programs, not as a constant."""
        return as_data(value, self._device)

    def seconds(self, body: Body, carry: Tensors, constants: Tensors, times: int) -> float:
        """Seconds of one execution of ``body``; the minimum of a few runs."""
        counter = self.sent(torch.zeros(times))

        def start() -> Sequence[torch.Tensor]:
            return loop(body, carry, [counter], constants, self._device)[0]

        self._run(start)
        best = min(self._run(start) for _ in range(_REPEATS))
        return max(best - self.overhead, 1e-9) / times

    def _run(self, start: Callable[[], Sequence[torch.Tensor]]) -> float:
        xm.wait_device_ops([])
        results = start()
        began = time.perf_counter()
        torch_xla.sync(wait=True)
        xm.wait_device_ops([])
        took = time.perf_counter() - began
        del results
        return took


def measure_device(watch: Stopwatch, chip: Chip | None) -> Iterator[Rate]:
    """Call on every rank; ``chip``: ``None`` on CPU ranks."""
    memory, transfer, sizes, most = 4 << 20, 4 << 20, [64, 256], 4
    bandwidth = peak = None
    if chip is not None:
        memory, transfer, sizes, most = 256 << 20, 64 << 20, [1024, 4096, 8192], 50
        bandwidth, peak = chip.device_hbm_bandwidth, chip.device_flops
    vector, factor = watch.sent(torch.ones(memory // 4)), watch.sent(torch.tensor(1.0))
    seconds = watch.seconds(_scale, [vector], [factor], most)
    yield Rate("HBM, read and written", "B", 2 * memory, seconds, bandwidth)
    for rows in sizes:
        matrix = torch.randn(rows, rows, generator=torch.Generator().manual_seed(rows))
        operand = watch.sent((matrix / rows**0.5).bfloat16())
        times = max(1, min(most, round(most * (4096 / rows) ** 2)))
        seconds = watch.seconds(_multiply, [operand], [operand], times)
        yield Rate(f"matrix product, {rows}, bfloat16", "FLOP", 2.0 * rows**3, seconds, peak)
    there = torch.ones(transfer // 4)
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
            raise RuntimeError("data from the device differs from the data that was sent to it")
    yield Rate("host to device", "B", transfer, best_out)
    yield Rate("device to host", "B", transfer, best_back)


def _scale(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    return [carry[0] * constants[0]], []


def _multiply(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
    return [carry[0] @ constants[0]], []


@dataclass(frozen=True)
class Axis:
    """Groups that communicate at the same time."""

    name: str
    groups: Groups

    @property
    def around(self) -> Groups:
        return tuple(
            (group[i], group[(i + 1) % len(group)])
            for group in self.groups
            for i in range(len(group))
        )


def axes(ranks: int, slice: Slice | None) -> list[Axis]:
    """Groups of all ranks, and along each axis of the slice."""
    found = [Axis("all", (tuple(range(ranks)),))]
    if slice is None:
        return found
    names = [f"{'xyz'[n]}, {length}" for n, length in enumerate(slice.device_shape[:3])]
    for axis, name in enumerate([*names, f"cores, {slice.chip.devices}"]):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(slice.coordinates()):
            groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        together = tuple(tuple(group) for group in groups.values())
        if 1 < len(together[0]) < ranks:
            found.append(Axis(name, together))
    return found


def modelled(time: CollectiveTime, slice: Slice | None) -> float | None:
    """Seconds by ``tpu/links.py``; ``None`` if the slice is unknown."""
    if slice is None:
        return None
    return collective_seconds(OneCollective(time.kind, time.bytes, time.groups), slice)


def measure_collectives(
    watch: Stopwatch, world: World, on_tpu: bool, slice: Slice | None, has_time: Callable
) -> Iterator[CollectiveTime]:
    """Measures each kind on each axis at each size, while ``has_time()``; call on every rank."""
    for axis in axes(world.size, slice):
        group = next(group for group in axis.groups if world.rank in group)
        place = group.index(world.rank)
        among = World(
            place, len(group), axis.groups, world.device, context=world.context
        )  # without routes: the compiler chooses the links
        for wanted in SIZES_ON_TPU if on_tpu else SIZES_ON_CPU:
            size = wanted // (4 * len(group)) * 4 * len(group)
            # Each loop runs one collective, but that of reduce-scatter also gathers.
            gather = 0.0
            for kind in ("all-gather", "reduce-scatter", "all-reduce", "collective-permute"):
                if not has_time():
                    return
                groups = axis.around if kind == "collective-permute" else axis.groups
                time = CollectiveTime(kind, axis.name, groups, size, 0.0)
                model = modelled(time, slice)
                times = round(_LONG / max(model or 0.0, _SHORTEST))
                times = 4 if world.context is not None else max(8, min(times, _MOST_TIMES))
                body, carry, constants = _collective_loop(watch, among, kind, size, axis)
                seconds = watch.seconds(body, carry, constants, times)
                if kind == "all-gather":
                    gather = seconds
                elif kind == "reduce-scatter":
                    seconds = max(seconds - gather, 1e-9)
                yield CollectiveTime(kind, axis.name, groups, size, seconds, model)


def _collective_loop(
    watch: Stopwatch, among: World, kind: str, size: int, axis: Axis
) -> tuple[Callable, list[torch.Tensor], list[torch.Tensor]]:
    """Each iteration needs the last one's results, so the compiler cannot remove any."""
    count = size // 4
    if kind == "all-gather":
        # Select by data, so that the compiler cannot drop the other parts.
        own = watch.sent(torch.tensor([among.rank]))

        def gather(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
            full = among.all_gather(carry[0]).view(among.size, -1)
            return [full.index_select(0, constants[0]).view(-1)], []

        return gather, [watch.sent(torch.zeros(count // among.size))], [own]
    collectives: dict[str, Callable] = {
        "reduce-scatter": lambda value: among.all_gather(among.reduce_scatter(value)),
        "all-reduce": among.all_reduce_sum,
        "collective-permute": lambda value: among.permute(value, axis.around),
    }

    def body(carry: Tensors, rows: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        return [collectives[kind](carry[0])], []

    return body, [watch.sent(torch.zeros(count))], []
