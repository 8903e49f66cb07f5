"""The communication plan: which tensors of an FSDP unit share which collective.

On a TPU, starting a collective costs as much as sending a few hundred kilobytes, and XLA does not
merge collectives that barriers order. So tensors of up to ``SMALL_BYTES`` share one there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Real
from typing import Any

import torch

from ..collectives.order import BackwardPrefetch, Event, Wait
from ..collectives.routes import Route
from ..collectives.world import World
from ..tpu.chips import LANES
from ..tpu.slices import Groups
from .layout import TensorSpec
from .mixed_precision import NARROW
from .options import FSDPOptions

# Sending 128 KiB over two links of a v5e ring takes 1.5 us; starting takes 3 us, plus 1 us a hop.
SMALL_BYTES = 1 << 17
# Tensors of a shared collective are in memory twice while they are split.
BUCKET_BYTES = 1 << 25


@dataclass(frozen=True)
class Collective:
    """An all-gather of shards, or a reduce-scatter of full gradients.

    Attributes:
        kind: ``"all-gather"`` or ``"reduce-scatter"``.
        tensors: numbers of the sharded tensors of the unit, in the order in which they are joined.
        shape: of one rank's part, ``(d, ...)``; the full tensor is ``(ranks * d, ...)``.
        waits: events that must happen before it starts.
        scale: the factor that the reduce-scatter itself applies: a power of two, which is exact.
        replica_groups: groups over which the result is then summed.
        divide_after: the divisor of the final sum, or ``None``.
    """

    kind: str
    name: str
    tensors: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int
    route: Route
    waits: tuple[Wait, ...] = ()
    divide_before: float = 1.0
    scale: float = 1.0
    replica_groups: Groups = ()
    divide_after: float | None = None

    @property
    def bytes(self) -> int:
        """Of the full tensor."""
        return math.prod(self.shape) * self.ranks * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        stages = " then ".join(
            f"{len(groups)} {'rings' if rings else 'groups'} of {len(groups[0])}"
            for groups, rings in zip_longest(self.route.stages, self.route.rings)
        )
        more = [
            f"after {wait.event.value}" + (f" {wait.before} before" if wait.before else "")
            for wait in self.waits
        ]
        more += [f"divided by {self.divide_before:g}"] * (self.divide_before != 1)
        more += [f"scaled by {self.scale:g}"] * (self.scale != 1)
        more += [f"summed over {len(one)} replicas" for one in self.replica_groups[:1]]
        more += (
            [] if self.divide_after is None else [f"divided by {self.divide_after:g} at the end"]
        )
        shape = f"{dtype}{list(self.shape)} a rank"
        return ", ".join([f"{self.kind} {self.name}: {shape}", stages, *more])


@dataclass(frozen=True)
class Divisors:
    before: float
    after: float

    @classmethod
    def of(cls, world: World, in_float16: bool) -> Divisors:
        """Divisors for the mean over all ranks.

        In float16 split evenly: a sum could overflow (65504), a full division underflow.
        """
        ranks, before = world.size * world.replicas, 1
        while in_float16 and before * before < ranks:
            before *= 2
        return cls(float(before), ranks / before)

    @property
    def product(self) -> float:
        return self.before * self.after


def checked_factor(name: str, value: Any) -> float:
    """Raises ValueError unless ``value`` is a positive number."""
    if not isinstance(value, Real) or value is True or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}. Pass the divisor")
    return float(value)


def reduced_in(dtype: torch.dtype, options: FSDPOptions) -> torch.dtype:
    return torch.float32 if dtype in NARROW and options.fp32_reduce_scatter else dtype


def gather_waits(options: FSDPOptions, world: World, backward: bool) -> tuple[Wait, ...]:
    """The events that the gathers of a unit wait for."""
    barriers = options.optimization_barrier_in_forward, options.optimization_barrier_in_backward
    if not (barriers[backward] and world.as_on_tpu):
        return ()
    if not backward:
        return (Wait(Event.INPUTS, 1 if options.forward_prefetch else 0),)
    prefetch = options.backward_prefetch
    waits = [Wait(Event.GRADIENT, 1 if prefetch is BackwardPrefetch.BACKWARD_PRE else 0)]
    if options.limit_all_gathers:  # full gradients of at most two units exist
        waits.append(Wait(Event.REDUCTIONS, 2))
        if prefetch is None:
            waits.append(Wait(Event.REDUCTIONS, 1))
    return tuple(waits)


def plan_gathers(
    specs: Sequence[TensorSpec],
    options: FSDPOptions,
    world: World,
    *,
    label: str = "",
    backward: bool = False,
    stored_among: World | None = None,
) -> list[Collective]:
    """The all-gathers of a unit, in order.

    Args:
        label: the unit's name with a dot after it.
        backward: gather the last tensors first: the compiler keeps the order of tracing.
        stored_among: the smaller group from whose ``SecondaryShards`` the backward gathers.
    """
    dtypes = [spec.compute_dtype(options.compute_dtype) for spec in specs]
    parts = _parts(specs, dtypes, world)
    if backward:
        parts.sort(key=lambda part: (len(part[0]) < 2, -part[0][0]))
    among = stored_among or world
    waits = gather_waits(options, world, backward)
    if world.as_on_tpu:
        waits += (Wait(Event.GATHER, 0),)  # the links carry one collective at a time anyway
    planned = []
    for numbers, dtype in parts:
        own = [specs[number] for number in numbers]
        name, (rows, *rest) = _joined(label, own)
        shape = (rows * world.size // among.size, *rest)
        size = math.prod(shape) * among.size * dtype.itemsize
        route = among.gather_route(size)
        planned.append(
            Collective("all-gather", name, tuple(numbers), shape, dtype, among.size, route, waits)
        )
    return planned


def plan_reductions(
    specs: Sequence[TensorSpec],
    dtypes: Mapping[int, torch.dtype],
    world: World,
    divisors: Divisors,
    *,
    label: str = "",
) -> list[Collective]:
    """The reductions of gradients, in order. ``dtypes``: of full gradients, by tensor number."""
    numbers = list(dtypes)
    own = [specs[number] for number in numbers]
    planned = []
    for part, dtype in _parts(own, list(dtypes.values()), world):
        together = [own[number] for number in part]
        name, shape = _joined(label, together)
        which = tuple(numbers[number] for number in part)
        planned.append(plan_reduction(world, which, name, shape, dtype, divisors))
    return planned


def plan_reduction(
    world: World,
    tensors: tuple[int, ...],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    divisors: Divisors,
) -> Collective:
    """One reduction, to ``(d, ...)`` on each rank."""
    full = math.prod(shape) * world.size * dtype.itemsize
    route = world.reduction_route(full, world.size * shape[0])
    # Scaling inside the collective is free, but rounds in the communication dtype.
    exact = scales_in_collective(divisors, world)
    return Collective(
        "reduce-scatter",
        name,
        tensors,
        shape,
        dtype,
        world.size,
        route,
        divide_before=divisors.before,
        scale=1 / divisors.after if exact else 1.0,
        replica_groups=world.replica_groups,
        divide_after=None if exact else divisors.after,
    )


def scales_in_collective(divisors: Divisors, world: World) -> bool:
    """Whether the reduce-scatter applies the divisor: if that is exact and no sum follows."""
    return math.frexp(divisors.after)[0] == 0.5 and world.replicas == 1


def _joined(label: str, specs: Sequence[TensorSpec]) -> tuple[str, tuple[int, ...]]:
    """The name of a collective of ``specs``, and the shape of a rank's part."""
    if len(specs) == 1:
        return label + specs[0].key, specs[0].layout.comm_shape
    length = sum(math.prod(spec.layout.shard_shape) for spec in specs)
    shape = (length // LANES, LANES) if length % LANES == 0 else (1, length)
    return f"{label}small_parameters", shape


def _along_with_wide(
    specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype]
) -> list[torch.dtype]:
    """``dtypes``, but float32 for all small tensors if one is: one collective is cheaper."""
    fits = [math.prod(spec.layout.padded_shape) * 4 <= SMALL_BYTES for spec in specs]
    each = list(zip(specs, dtypes, fits, strict=True))
    if not any(spec.wide and dtype is torch.float32 and fit for spec, dtype, fit in each):
        return [*dtypes]
    return [torch.float32 if fit and dtype in NARROW else dtype for _, dtype, fit in each]


def _parts(
    specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype], world: World
) -> list[tuple[list[int], torch.dtype]]:
    """Numbers of ``specs`` by collective, small ones first, without empty tensors."""
    sent = [number for number, spec in enumerate(specs) if spec.layout.numel]
    if not world.as_on_tpu:
        return [([number], dtypes[number]) for number in sent]
    dtypes = _along_with_wide(specs, dtypes)
    together: dict[torch.dtype, list[list[int]]] = {}
    filled: dict[torch.dtype, int] = {}
    alone = []
    for number in sent:
        dtype = dtypes[number]
        size = math.prod(specs[number].layout.padded_shape) * dtype.itemsize
        if size > SMALL_BYTES:
            alone.append(([number], dtype))
            continue
        buckets = together.setdefault(dtype, [])
        if not buckets or filled[dtype] + size > BUCKET_BYTES:
            buckets.append([])
            filled[dtype] = 0
        buckets[-1].append(number)
        filled[dtype] += size
    shared = [(bucket, dtype) for dtype, buckets in together.items() for bucket in buckets]
    return [*shared, *alone]
