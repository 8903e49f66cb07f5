"""The sharded parameters of equal blocks, stacked: what a scan gathers from and reduces to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from ..collectives.order import Order, after
from ..collectives.world import World
from ..layers import linear
from ..names import dotted
from ..sharding.around import note_sharded
from ..sharding.attributes import refuse_replacement
from ..sharding.block_memory import BlockMemory
from ..sharding.layout import Layout
from ..sharding.options import FSDPOptions
from ..sharding.secondary import Secondary
from ..sharding.sharded_parameter import local
from ..sharding.sharded_tensor import Place, ShardedTensor
from ..sharding.state import FSDPState
from ..sharding.unsharded import Origin, make_unsharded

Spots = list[tuple[nn.Module, str]]


@dataclass(eq=False)
class Stack:
    """One buffer of all blocks, or parameter.

    Attributes:
        names: dotted names in a block; a shared parameter has several.
        spots: modules of the template that use it, and as what.
        shared: a buffer that is the same tensor in all blocks, and is not stacked.
    """

    names: list[str]
    spots: Spots
    shared: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def value(self) -> torch.Tensor:
        """``(depth, ...)``, or ``(...)`` if shared."""
        module, name = self.spots[0]
        buffer = module._buffers[name]
        assert buffer is not None  # it was found there, and is always put back
        return buffer

    def put(self, value: torch.Tensor) -> None:
        """Has the template hold ``value``."""
        for module, name in self.spots:
            module._buffers[name] = value


@dataclass(eq=False)
class ParameterStack(Stack):
    """One parameter of all blocks.

    Attributes:
        layout: how a block's parameter is cut.
        wide: whether it is computed with as it is stored, whatever compute_dtype says.
    """

    layout: Layout = field(kw_only=True)
    wide: bool = False

    @property
    def numel(self) -> int:
        """Elements of one block's shard."""
        return torch.Size(self.layout.shard_shape).numel()

    @property
    def value(self) -> nn.Parameter:
        """``(depth, *shard_shape)``; inside of the loop a full parameter, which is none."""
        module, name = self.spots[0]
        parameter = module._parameters.get(name)
        if parameter is None:
            refuse_replacement(self.name)
        return parameter

    def put(self, value: torch.Tensor) -> None:
        for module, name in self.spots:
            # Inside of the loop no Parameter, but answers as one.
            module._parameters[name] = value  # type: ignore[assignment]


class ScanUnit(FSDPState):
    """The shards of ``depth`` equal blocks, each stacked over the blocks.

    To the outside every block has sharded tensors of its own (``tensors`` and ``places``: names and
    layouts, without values), which is what shard metadata and plans speak of. ``shards`` are the
    stacked parameters, which the optimizer sees. They rest in the template, the block that is
    traced for all.
    """

    def __init__(self, options: FSDPOptions, world: World, template: nn.Module) -> None:
        super().__init__(options, world, template)
        self.depth: int = 0
        # `tensors` are what each block has of it.
        self.stored: list[ShardedTensor] = []
        self.parameters: list[ParameterStack] = []
        self.buffers: list[Stack] = []
        if world.as_on_tpu:
            self.linears = linear.layers_in(template.modules())

    @property
    def sources(self) -> list[torch.Tensor]:
        """What the loops slice: the stacked shards, or what the device has of them."""
        return [tensor.source for tensor in self.stored]

    def describe_blocks(self, depth: int, cast: dict[str, torch.dtype]) -> None:
        """Fills in ``stored``, ``tensors``, ``places`` and ``buffer_dtypes``.

        ``cast``: buffers that were cast, by name in a block, with the dtype they had.
        """
        self.depth = depth
        self.stored = [
            ShardedTensor(
                stack.value,
                stack.layout,
                stack.name,
                wide=stack.wide,
                world=self.world,
                comms=self.comms,
            )
            for stack in self.parameters
        ]
        for block in map(str, range(depth)):
            for stack in self.parameters:
                row = torch.empty_like(local(stack.value)[0], device="meta")
                row = nn.Parameter(row, requires_grad=stack.value.requires_grad)
                tensor = ShardedTensor(
                    row, stack.layout, dotted(block, stack.name), wide=stack.wide
                )
                index = self.adopt(tensor)
                for module, name in stack.spots:
                    note_sharded(module)
                    self.places.append(Place(module, name, index, stack.value, block))
            for name, dtype in cast.items():
                self.buffer_dtypes[dotted(block, name)] = dtype

    # -- one block, inside the loop -------------------------------------------------------------

    def gather_block(
        self,
        shards: Sequence[torch.Tensor],
        x: torch.Tensor,
        order: Order,
        secondary: Secondary | None = None,
    ) -> list[torch.Tensor]:
        """The full parameters of one block in compute dtype, from its shards.

        ``x``: something that iterations hand on. Not tied to it, the cast of the shards would be
        taken out of the loop by the compiler, and done for all blocks at once: shards twice in
        memory. ``order``: what is gathered before. ``secondary``: as of
        :meth:`Communicator.trace_gathers`.
        """
        if secondary is not None and secondary.pieces:
            tied = after(list(secondary.pieces.values()), [x])
            pieces = dict(zip(secondary.pieces, tied, strict=True))
            secondary = replace(secondary, pieces=pieces)
        else:
            shards = after(shards, [x])
        return self.comms.trace_gathers(self._block(shards), order, (), False, secondary)

    def order_after(self, event: torch.Tensor) -> Order:
        """In which what is gathered comes after ``event``."""
        order = Order()
        if self.world.as_on_tpu and event.numel():
            order.add_gather(event)
        return order

    def after_reductions(
        self, tensor: torch.Tensor, shares: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """``tensor``, not before the gradients ``shares`` are reduced, if nothing else can run
        meanwhile anyway."""
        if self.world.as_on_tpu:
            for share in shares:
                # In the dtype in which it comes out of the reduction, or a wider one.
                full = self.world.size * share.numel() * share.dtype.itemsize
                if not self.world.overlaps_reductions(full):
                    tensor = self.order_after(share).delay(tensor)
        return tensor

    def secondary(self, pieces: Mapping[int, torch.Tensor] | None = None) -> Secondary | None:
        """What one block's forward keeps for its backward, by default nothing yet.

        ``None`` where the backward gathers from the shards.
        """
        if self.secondaries is None:
            return None
        return Secondary(self.secondaries.world, pieces=dict(pieces or {}))

    def reduce_block(
        self,
        shards: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        memory: BlockMemory,
    ) -> dict[int, torch.Tensor]:
        """Gradient shards of one block, by parameter number, where there is a gradient.

        In the dtype in which they come out of the reduction, if that is all there is to it: the
        stack of all blocks' gradients takes half the memory then. ``memory``: that of a
        communication hook.
        """
        present = {number: [grad] for number, grad in enumerate(grads) if grad is not None}
        fulls = self.comms.joined(self._block(shards), present, {})
        exact = self.comms.keeps_communication_dtype
        tensors = self._block(
            shard.to(fulls[number].dtype) if exact and number in fulls else shard
            for number, shard in enumerate(shards)
        )
        for tensor, stored in zip(tensors, self.stored, strict=True):
            tensor.widens = stored.widens
        self.memory = memory
        try:
            return self.comms.trace_reductions(tensors, fulls)[0] if fulls else {}
        finally:
            self.memory = None

    def names_of(self, tensor: ShardedTensor, members: int, block: int | None = None) -> list[str]:
        path = tensor.key if block is None else dotted(str(block), tensor.key)
        return [self.comms.label + path]

    @contextlib.contextmanager
    def installed(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Within, the template computes with these full parameters and buffers."""
        stacks: list[Stack] = [*self.parameters, *self.buffers]
        resting = [stack.value for stack in stacks]
        for number, value in enumerate(parameters):
            name = partial(self.name_of, number)  # that of the first block
            make_unsharded(value, Origin(self.stored[number], 0, name, alone=False))
        try:
            for stack, value in zip(stacks, [*parameters, *buffers], strict=True):
                stack.put(value)
            linear.replace_forwards(self.linears, self.world, in_loop=True)
            yield
        finally:
            linear.restore_forwards(self.linears)
            for stack, value in zip(stacks, resting, strict=True):
                stack.put(value)

    def _block(self, shards: Iterable[torch.Tensor]) -> list[ShardedTensor]:
        return [
            # What stands for a shard in the trace is no Parameter.
            ShardedTensor(shard, stack.layout, stack.name, wide=stack.wide)  # type: ignore[arg-type]
            for shard, stack in zip(shards, self.parameters, strict=True)
        ]
