"""The communication plan: which tensors of an FSDP unit travel in which collective, as data.

A plan is a list of :class:`Collective`, computed from layouts, options and the ranks, without
tensors. ``comms.py`` executes it.

Starting a collective costs a TPU as much as sending some hundred kilobytes, and XLA's combiner does
not merge collectives that barriers tie to other tensors. So tensors of up to 128 KiB share one. A
larger one has a collective to itself: it needs no copies to be joined and split, and it can be
under way while another is computed with. On CPU ranks, where starting costs next to nothing, every
tensor has a collective to itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..collectives.order import Event, Wait, waits_of_backward, waits_of_forward
from ..collectives.routes import Route
from ..collectives.world import World
from ..tpu.slices import Groups
from .layout import LANES, TensorSpec
from .options import FSDPOptions

# Full parameters of up to this many bytes share a collective. 128 KiB take the two links of a v5e
# ring 1.5 us; starting a collective takes 3 us and one more for every hop.
SMALL_BYTES = 1 << 17
# But not more than this: what shares a collective is in memory twice while it is split.
BUCKET_BYTES = 1 << 25

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Collective:
    """An all-gather of shards, or a reduce-scatter of full gradients.

    Attributes:
        kind: ``"all-gather"`` or ``"reduce-scatter"``.
        name: for those who read the compiled program.
        tensors: numbers of the sharded tensors of the unit, in the order in which they are joined.
        shape: of one rank's part, ``(d, ...)``; the full tensor is ``(ranks * d, ...)``.
        dtype: the communication dtype.
        ranks: how many take part.
        route: over the links.
        waits: what it must not start before.
        divide_before: what full gradients are divided by before the reduction.
        scale: what the reduce-scatter itself multiplies by; only powers of two, which are exact.
        replica_groups: over which the result is summed up then.
        divide_after: what the sum is divided by in the end; ``None``: the reduce-scatter itself
            has made the mean.
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
            for groups, rings in zip(
                self.route.stages, self.route.rings or [None] * len(self.route.stages), strict=True
            )
        )
        waits = "".join(
            f", after {wait.event.value}" + (f" {wait.before} before" if wait.before else "")
            for wait in self.waits
        )
        return f"{self.kind} {self.name}: {dtype}{list(self.shape)} a rank, {stages}{waits}"


@dataclass(frozen=True)
class Divisors:
    """What gradients are divided by before and after the reduction."""

    before: float
    after: float

    @classmethod
    def of(cls, world: World, in_float16: bool) -> Divisors:
        """The mean over all ranks.

        ``in_float16``: gradients are summed up in float16, so the division is split evenly. A sum
        over many ranks would overflow (65504), a full division beforehand would underflow.
        """
        ranks, before = world.size * world.replicas, 1
        while in_float16 and before * before < ranks:
            before *= 2
        return cls(float(before), ranks / before)

    @property
    def product(self) -> float:
        """Of both."""
        return self.before * self.after


def reduced_in(dtype: torch.dtype, options: FSDPOptions) -> torch.dtype:
    """In which a gradient of ``dtype`` is reduced."""
    return torch.float32 if dtype in NARROW and options.fp32_reduce_scatter else dtype


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
        backward: the last are asked for first. The compiler keeps to the order of tracing where
            nothing else decides, and a parameter gathered before its turn takes up memory.
        stored_among: the smaller group that has a second copy (``secondary.py``), from which a
            backward gathers.
    """
    dtypes = [spec.compute_dtype(options.compute_dtype) for spec in specs]
    parts = _parts(specs, _along_with_wide(specs, dtypes, world), world)
    if backward:
        parts.sort(key=lambda part: (len(part[0]) < 2, -part[0][0]))
    among = stored_among or world
    waits: tuple[Wait, ...] = ()
    if world.as_on_tpu:
        waits = (
            waits_of_backward(options.backward_prefetch, options.limit_all_gathers)
            if backward
            else waits_of_forward(options.forward_prefetch)
        )
        waits += (Wait(Event.GATHER, 0),)  # the links carry one at a time anyway
    planned = []
    for numbers, dtype in parts:
        own = [specs[number] for number in numbers]
        rows, *rest = _joined_shape(own)
        shape = (rows * world.size // among.size, *rest)
        size = math.prod(shape) * among.size * dtype.itemsize
        name, route = _name(label, own), among.gather_route(size)
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
    """The reductions of gradients, in order.

    Args:
        dtypes: of the full gradients, by number of the tensor; the others have none.
    """
    numbers = list(dtypes)
    own = [specs[number] for number in numbers]
    planned = []
    for part, dtype in _parts(own, _along_with_wide(own, list(dtypes.values()), world), world):
        together = [own[number] for number in part]
        name, shape = _name(label, together), _joined_shape(together)
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
    """One reduction whose result is ``(d, ...)`` on each rank."""
    full = math.prod(shape) * world.size * dtype.itemsize
    route = world.reduction_route(full, world.size * shape[0])
    # Scaling in the collective costs nothing, but is done in the communication dtype: only by a
    # power of two, and where nothing else is to be summed up first.
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
    """Whether the reduce-scatter itself divides."""
    return math.frexp(divisors.after)[0] == 0.5 and world.replicas == 1


def lanes(length: int) -> tuple[int, int]:
    """The shape in which ``length`` elements a rank travel that several tensors have."""
    return (length // LANES, LANES) if length % LANES == 0 else (1, length)


def _name(label: str, specs: Sequence[TensorSpec]) -> str:
    return label + (specs[0].key if len(specs) == 1 else "small_parameters")


def _joined_shape(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The shape in which a rank's parts of ``specs`` travel."""
    if len(specs) == 1:
        return specs[0].layout.wire_shape
    return lanes(sum(math.prod(spec.layout.shard_shape) for spec in specs))


def _along_with_wide(
    specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype], world: World
) -> list[torch.dtype]:
    """``dtypes``, but float32 for small tensors of 16 bits if wide ones in float32 are among them:
    all share a collective then, and twice the bytes of a few biases cost less than one more."""
    fits = [math.prod(spec.layout.padded_shape) * 4 <= SMALL_BYTES for spec in specs]
    each = list(zip(specs, dtypes, fits, strict=True))
    wide = any(spec.wide and dtype is torch.float32 and fit for spec, dtype, fit in each)
    if not (world.as_on_tpu and wide):
        return [*dtypes]
    return [torch.float32 if fit and dtype in NARROW else dtype for _, dtype, fit in each]


def _parts(
    specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype], world: World
) -> list[tuple[list[int], torch.dtype]]:
    """Numbers of ``specs`` by collective, with its dtype: the small ones of each dtype first, then
    each other one by itself. Those without elements do not travel."""
    sent = [number for number, spec in enumerate(specs) if spec.layout.numel]
    if not world.as_on_tpu:
        return [([number], dtypes[number]) for number in sent]
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
