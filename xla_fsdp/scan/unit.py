"""The sharded parameters of equal blocks, stacked: the loops gather from and reduce to them."""

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
from ..sharding.block_state import BlockState
from ..sharding.comms import SecondaryShards
from ..sharding.gathering import Origin, make_unsharded
from ..sharding.layout import Layout
from ..sharding.options import FSDPOptions
from ..sharding.sharded_parameter import local
from ..sharding.sharded_tensor import ParameterSlot, ShardedTensor, raise_replaced
from ..sharding.state import FSDPState, mark_sharded

Uses = list[tuple[nn.Module, str]]


@dataclass(eq=False)
class Stack:
    """One buffer or parameter of all blocks.

    Attributes:
        names: dotted names in a block; a shared parameter has several.
        uses: modules of the template that use it, and their attribute names.
        shared: whether a buffer is the same tensor in all blocks, and therefore not stacked.
    """

    names: list[str]
    uses: Uses
    shared: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def value(self) -> torch.Tensor:
        """``(depth, ...)``, or ``(...)`` if shared."""
        module, name = self.uses[0]
        buffer = module._buffers[name]
        assert buffer is not None  # it was found in the module and is always restored
        return buffer

    def put(self, value: torch.Tensor) -> None:
        """Sets the attribute of the template to ``value``."""
        for module, name in self.uses:
            module._buffers[name] = value


@dataclass(eq=False)
class ParameterStack(Stack):
    """One parameter of all blocks.

    Attributes:
        layout: how a block's parameter is cut.
        wide: whether it is computed in the dtype of the shard, whatever compute_dtype is.
    """

    layout: Layout = field(kw_only=True)
    wide: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of one block's shard."""
        return torch.Size(self.layout.shard_shape).numel()

    @property
    def value(self) -> nn.Parameter:
        """``(depth, *shard_shape)``; inside the loop a full parameter, which is no Parameter."""
        module, name = self.uses[0]
        parameter = module._parameters.get(name)
        if parameter is None:
            raise_replaced(self.name)
        return parameter

    def put(self, value: torch.Tensor) -> None:
        for module, name in self.uses:
            # Inside the loop it is not a Parameter, but behaves like one.
            module._parameters[name] = value  # type: ignore[assignment]


class ScanUnit(FSDPState):
    """The shards of ``depth`` equal blocks, each stacked over the blocks.

    For shard metadata and plans, every block has separate sharded tensors (``tensors`` and
    ``slots``: names and layouts, without values). ``shards`` are the stacked parameters, which the
    optimizer sees. They are attributes of the template, the block that is traced for all.
    """

    def __init__(self, options: FSDPOptions, world: World, template: nn.Module) -> None:
        super().__init__(options, world, template)
        self.depth: int = 0
        # `tensors` are the parts of these that belong to each block.
        self.stored: list[ShardedTensor] = []
        self.parameters: list[ParameterStack] = []
        self.buffers: list[Stack] = []
        if world.as_on_tpu:
            self.linears = linear.layers_in(template.modules())

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that the loops slice: the stacked shards, or their copies on the device."""
        return [tensor.source for tensor in self.stored]

    def describe_blocks(self, depth: int, cast: dict[str, torch.dtype]) -> None:
        """Fills in ``stored``, ``tensors``, ``slots`` and ``buffer_dtypes``.

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
                index = self.add_tensor(tensor)
                for module, name in stack.uses:
                    mark_sharded(module)
                    self.slots.append(ParameterSlot(module, name, index, stack.value, block))
            for name, dtype in cast.items():
                self.buffer_dtypes[dotted(block, name)] = dtype

    # -- one block, inside the loop -------------------------------------------------------------

    def gather_block(
        self,
        shards: Sequence[torch.Tensor],
        x: torch.Tensor,
        order: Order,
        secondary: SecondaryShards | None = None,
    ) -> list[torch.Tensor]:
        """The full parameters of one block in compute dtype, from its shards.

        ``x``: a tensor of the carry. The shards are tied to it: otherwise the compiler would move
        their cast out of the loop and cast all blocks in one operation, so that shards are in
        memory twice. ``order``: earlier gathers. ``secondary``: as in
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
        """An order in which gathers come after ``event``."""
        order = Order()
        if self.world.as_on_tpu and event.numel():
            order.add_gather(event)
        return order

    def after_reductions(
        self, tensor: torch.Tensor, shares: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """``tensor``, tied to the end of the reductions of ``shares``, if nothing else could run
        during them."""
        if self.world.as_on_tpu:
            for share in shares:
                # The communication dtype or a wider one: an upper bound of the bytes.
                full = self.world.size * share.numel() * share.dtype.itemsize
                if not self.world.overlaps_reductions(full):
                    tensor = self.order_after(share).delay(tensor)
        return tensor

    def secondary(self, pieces: Mapping[int, torch.Tensor] | None = None) -> SecondaryShards | None:
        """The second shard that one block's forward stores for its backward; by default empty.

        ``None`` if the backward gathers from the shards.
        """
        if self.secondaries is None:
            return None
        return SecondaryShards(self.secondaries.world, pieces=dict(pieces or {}))

    def reduce_block(
        self,
        shards: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        memory: BlockState,
    ) -> dict[int, torch.Tensor]:
        """Gradient shards of one block, by parameter number, for those with a gradient.

        They keep the communication dtype if no other operation follows the reduction, so that the
        stack of all blocks' gradients takes half the memory. ``memory``: of a communication hook.
        """
        present = {number: [grad] for number, grad in enumerate(grads) if grad is not None}
        fulls = self.comms.join_gradients(self._block(shards), present, {})
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
        """Within, the template uses these full parameters and buffers."""
        stacks: list[Stack] = [*self.parameters, *self.buffers]
        resting = [stack.value for stack in stacks]
        for number, value in enumerate(parameters):
            name = partial(self.name_of, number)  # the name in the first block
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
            # In the trace a plain tensor replaces the shard.
            ShardedTensor(shard, stack.layout, stack.name, wide=stack.wide)  # type: ignore[arg-type]
            for shard, stack in zip(shards, self.parameters, strict=True)
        ]
