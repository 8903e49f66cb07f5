"""The bytes of a unit: its shards on their way out, its gradients on their way back.

A collective costs microseconds before it moves a byte, and most parameters of a model (biases,
norms) are small. So all small ones of a unit share one collective, rank by rank: ``[a0 b0][a1 b1]``
for parameters ``a`` and ``b`` of two ranks, since a gather puts ranks one behind the other. Large
ones travel alone: they need no copies to be put together and taken apart, and each can be under way
while another is computed with. On CPU ranks, where starting costs next to nothing, all travel so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ..collectives.order import Order, after
from ..collectives.world import World
from .full_precision import along_with_wide
from .layout import LANES, Layout
from .options import FSDPOptions
from .secondary import Secondary
from .sharded_tensor import ShardedTensor, computed_in

# Full parameters of up to this many bytes on the wire travel together. 128 KiB take the two links
# of a v5e ring 1.5 us; starting a collective takes 3 us and one more for every hop.
SMALL_BYTES = 1 << 17
# But not more at a time: what travels together is there twice while it is taken apart.
BUCKET_BYTES = 1 << 25
# What is larger is reduced beside compute, where that is possible: it takes a few more steps.
BESIDE_BYTES = 1 << 20


# Makes a reduction of the tensors' full gradients, as :meth:`Wire.reducible` made these.
Reduction = Callable[[Sequence[ShardedTensor], Sequence[torch.Tensor]], torch.Tensor]


class Wire:
    """Gathers and reduces the sharded tensors of one unit.

    Attributes:
        predivide, postdivide: divisors of gradients before and after the reduction.
        hook: what a user registered to make each reduction instead of :meth:`average`.
    """

    def __init__(self, options: FSDPOptions, world: World):
        self.options = options
        self.world = world
        self.label = ""
        self.hook: Reduction | None = None
        self.predivide, self.postdivide = 1.0, float(world.size * world.replicas)
        if options.compute_dtype is torch.float16:
            self.divide_in_float16()

    def divide_in_float16(self) -> None:
        """Splits the division evenly: a sum over many ranks would overflow (65504), a full division
        beforehand would underflow."""
        if not self.options.fp32_reduce_scatter:
            ranks, before = self.world.size * self.world.replicas, 1
            while before * before < ranks:
                before *= 2
            self.predivide, self.postdivide = float(before), ranks / before

    @property
    def divides_on_the_wire(self) -> bool:
        """Whether the collective itself scales. That costs nothing, but is done in the dtype of the
        wire: only by a power of two, which is exact, and where nothing else is to be summed up
        first."""
        return self._divides_on_the_wire(self.postdivide)

    def _divides_on_the_wire(self, divisor: float) -> bool:
        return math.frexp(divisor)[0] == 0.5 and self.world.replicas == 1

    # -- gathering ------------------------------------------------------------------------------

    def gather(
        self,
        tensors: Sequence[ShardedTensor],
        order: Order,
        events: Sequence[torch.Tensor],
        backward: bool,
        secondary: Secondary | None = None,
    ) -> list[torch.Tensor]:
        """Every full parameter of ``tensors`` in compute dtype, traced to run after ``events``.

        ``backward``: the last are asked for first. The compiler keeps to the order of tracing where
        nothing else decides, and a parameter gathered before its turn takes up memory.
        ``secondary``: gathered from, if it holds something; else a forward fills it.
        """
        parts, dtypes = self.gathered_parts(tensors), self._gathered_dtypes(tensors)
        if backward:
            parts.sort(key=lambda part: (len(part) < 2, -part[0]))
        world = self.world
        kept: dict[int, torch.Tensor] = {}
        if secondary is not None and secondary.pieces:
            world, kept = secondary.world, secondary.pieces
        packed = [
            (kept[part[0]], tuple(kept[part[0]].shape))
            if kept
            else _packed([tensors[i] for i in part])
            for part in parts
        ]
        shards = [shard for shard, _ in packed]
        # On a CPU torch_xla's token has them in order, and barriers are dropped.
        in_turn = self.world.as_on_tpu
        if in_turn:
            shards = after(shards, events)
        full: dict[int, list[torch.Tensor]] = {}
        for part, shard, (_, shape) in zip(parts, shards, packed, strict=True):
            # First of all the waiting, that of the barrier and this one: the compiler drops the
            # barrier in the end, and what both the forward and the backward do to a stored shard
            # before they wait (reshape it to the tiles of the wire, cast it), it does once and
            # keeps in between.
            shard = order.turn(shard).view(shape) if in_turn else torch.view_copy(shard, shape)
            if not kept:
                shard = shard.to(dtypes[part[0]])
            gathered = world.all_gather(shard, self.name([tensors[i] for i in part]))
            if secondary is not None and not kept and not backward:
                gathered = secondary.keep(part[0], gathered)
            if in_turn:
                order.gathered(gathered)
            layouts = [tensors[i].layout for i in part]
            for i, whole in zip(part, _unpacked(gathered, layouts), strict=True):
                dtype = self.compute_dtype(tensors[i])
                full[i] = [value.to(dtype) for value in tensors[i].layout.split(whole)]
        for i, tensor in enumerate(tensors):
            if not tensor.layout.numel:
                shard = tensor.source.to(self.compute_dtype(tensor))
                full[i] = [shard.new_zeros(member.shape) for member in tensor.layout.members]
        return [value for i in range(len(tensors)) for value in full[i]]

    def gathered_parts(self, tensors: Sequence[ShardedTensor]) -> list[list[int]]:
        """Numbers of ``tensors`` by gather: see :meth:`_parts`."""
        return self._parts(tensors, self._gathered_dtypes(tensors))

    def last_gathered(self, tensors: Sequence[ShardedTensor]) -> int:
        """The number of the tensor that a forward gathers last."""
        parts = self.gathered_parts(tensors) or [[0]]  # nothing travels: any
        return parts[-1][-1]

    def _gathered_dtypes(self, tensors: Sequence[ShardedTensor]) -> list[torch.dtype]:
        return self._dtypes(tensors, [self.compute_dtype(tensor) for tensor in tensors])

    def compute_dtype(self, tensor: ShardedTensor) -> torch.dtype:
        """In which the members of ``tensor`` are computed with."""
        return computed_in(tensor.shard.dtype, None if tensor.wide else self.options.compute_dtype)

    def _dtypes(
        self, tensors: Sequence[ShardedTensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.dtype]:
        """The dtype of each on the wire, being computed with or reduced in ``dtypes``."""
        return along_with_wide(tensors, dtypes, SMALL_BYTES) if self.world.as_on_tpu else [*dtypes]

    # -- reducing -------------------------------------------------------------------------------

    def reducible(self, layout: Layout, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The full gradients of a tensor's members as one, in the shape and dtype to reduce it."""
        full = layout.join(grads)
        return full.to(self.reduced_dtype(full.dtype))

    def reduced_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which a gradient of ``dtype`` is reduced."""
        narrow = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if narrow and self.options.fp32_reduce_scatter else dtype

    def joined(
        self,
        tensors: Sequence[ShardedTensor],
        grads: Mapping[int, Sequence[torch.Tensor | None]],
        held: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """What :meth:`reducible` makes of the members' ``grads``, by number in ``tensors``, added
        to what it made of earlier ones."""
        fulls = {n: self.reducible(tensors[n].layout, members) for n, members in grads.items()}
        return {n: held[n] + full if n in held else full for n, full in fulls.items()}

    def reduce(
        self, tensors: Sequence[ShardedTensor], fulls: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """Gradient shards from what :meth:`reducible` made, by number in ``tensors``.

        Returns them, and what came out of the collectives, whose existence says that the
        reductions are over.
        """
        shards: dict[int, torch.Tensor] = {}
        arrived = []
        numbers = list(fulls)
        sent = [tensors[i] for i in numbers]
        dtypes = self._dtypes(sent, [full.dtype for full in fulls.values()])
        fulls = {i: fulls[i].to(dtype) for i, dtype in zip(numbers, dtypes, strict=True)}
        for part in self._parts(sent, dtypes):
            part = [numbers[i] for i in part]
            own = [tensors[i] for i in part]
            reduced = (self.hook or self.average)(own, [fulls[i] for i in part])
            arrived.append(reduced)
            for i, tensor, piece in zip(part, own, self.shares(reduced, own), strict=True):
                # The host widens what it gets: fewer bytes to send.
                stays = tensor.widens or piece.dtype == tensor.shard.dtype
                shards[i] = piece if stays else piece.to(tensor.shard.dtype)
        for i in numbers:
            if not tensors[i].layout.numel:
                shards[i] = torch.zeros_like(tensors[i].source)
        return shards, arrived

    def average(
        self, tensors: Sequence[ShardedTensor], fulls: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The sum over all ranks, divided, of this rank's rows."""
        return self.averaged(
            self.packed(fulls), self.name(tensors), self.predivide, self.postdivide
        )

    def packed(self, fulls: Sequence[torch.Tensor]) -> torch.Tensor:
        """Full gradients that are reduced together as one, rank by rank."""
        if len(fulls) == 1:
            return fulls[0]
        full = torch.cat([full.reshape(self.world.size, -1) for full in fulls], dim=1)
        rows, *rest = lanes(full.shape[1])
        return full.reshape(self.world.size * rows, *rest)

    def averaged(
        self, full: torch.Tensor, name: str, before: float, after: float, narrow: bool = False
    ) -> torch.Tensor:
        """This rank's rows of the sum over all ranks of ``full``, divided ``before`` it and after.

        ``narrow``: replicas are summed up in the dtype of ``full``, not in float32.
        """
        if before != 1:
            full = full / before
        exact = self._divides_on_the_wire(after)
        scale = 1 / after if exact else 1.0
        beside = self.beside_compute(full)
        shard = self.world.reduce_scatter(full, name, scale, beside_compute=beside)
        if exact:
            return shard
        shard = self.world.sum_over_replicas(shard if narrow else widened(shard), name)
        return widened(shard) / after

    def beside_compute(self, full: torch.Tensor) -> bool:
        """Whether ``full`` is so large that its reduction should run beside compute."""
        return self.world.as_on_tpu and full.numel() * full.dtype.itemsize > BESIDE_BYTES

    def shares(self, reduced: torch.Tensor, tensors: Sequence[ShardedTensor]) -> list[torch.Tensor]:
        """Every tensor's shard, out of what came from one reduction."""
        # Not views: torch_xla would keep what they are views of as well, while somebody holds one.
        if len(tensors) == 1:
            return [torch.view_copy(reduced, tensors[0].layout.shard_shape)]
        flat, first, shares = reduced.reshape(-1), 0, []
        for tensor in tensors:
            length = tensor.shard.numel()
            share = torch.slice_copy(flat, 0, first, first + length)
            shares.append(share.reshape(tensor.layout.shard_shape))
            first += length
        return shares

    # -- which travel together ------------------------------------------------------------------

    def _parts(
        self, tensors: Sequence[ShardedTensor], dtypes: Sequence[torch.dtype]
    ) -> list[list[int]]:
        """Numbers of ``tensors`` by collective: the small ones of each dtype first, then each other
        one by itself. Those without elements do not travel."""
        if not self.world.as_on_tpu:
            return [[i] for i, tensor in enumerate(tensors) if tensor.layout.numel]
        together: dict[torch.dtype, list[list[int]]] = {}
        filled: dict[torch.dtype, int] = {}
        alone = []
        for i, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
            size = math.prod(tensor.layout.padded_shape) * dtype.itemsize
            if not tensor.layout.numel:
                continue
            if size > SMALL_BYTES:
                alone.append([i])
                continue
            buckets = together.setdefault(dtype, [])
            if not buckets or filled[dtype] + size > BUCKET_BYTES:
                buckets.append([])
                filled[dtype] = 0
            buckets[-1].append(i)
            filled[dtype] += size
        return [*(bucket for buckets in together.values() for bucket in buckets), *alone]

    def name(self, tensors: Sequence[ShardedTensor]) -> str:
        """What to call a collective of ``tensors``."""
        if len(tensors) == 1:
            return self.label + tensors[0].key
        return f"{self.label}small_parameters"


def widened(shard: torch.Tensor) -> torch.Tensor:
    """``shard`` in float32 if its dtype is narrower."""
    return shard.float() if shard.dtype in (torch.float16, torch.bfloat16) else shard


def _packed(tensors: Sequence[ShardedTensor]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank sends for ``tensors``, and the shape to send it in."""
    if len(tensors) == 1:
        return tensors[0].source, tensors[0].layout.wire_shape
    shard = torch.cat([_flat(tensor.source) for tensor in tensors])
    return shard, lanes(shard.shape[0])


def _flat(shard: torch.Tensor) -> torch.Tensor:
    return shard if shard.dim() == 1 else shard.reshape(-1)


def lanes(length: int) -> tuple[int, int]:
    """The shape in which ``length`` elements a rank travel together."""
    return (length // LANES, LANES) if length % LANES == 0 else (1, length)


def _unpacked(gathered: torch.Tensor, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """The shards of all ranks, ``(size * rows, ...)`` for each layout, out of one gather."""
    if len(layouts) == 1:
        return [gathered]
    size = layouts[0].size
    by_rank = gathered.view(size, -1)
    first, pieces = 0, []
    for layout in layouts:
        length = math.prod(layout.shard_shape)
        rows, *rest = layout.wire_shape
        piece = torch.slice_copy(by_rank, 1, first, first + length)
        pieces.append(piece.view(size * rows, *rest))
        first += length
    return pieces
