"""Turns equal blocks into one template module and stacked shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..collectives.host_data import LARGE, fake_cpu_tensor
from ..collectives.order import Order, after
from ..collectives.world import World
from ..layers import linear
from ..layers.saved_activations import ATTENTION
from ..names import dotted, is_wrapper
from ..ranks.rank import is_simulated_rank
from ..sharding.building import Builder, own_shard
from ..sharding.comm_plan import scales_in_collective
from ..sharding.comms import SecondaryShards
from ..sharding.deferred_values import Key, UninitializedTensor, is_deferred, materialize
from ..sharding.gathering import Origin, make_unsharded
from ..sharding.layout import Layout
from ..sharding.mixed_precision import compute_in_float32, full_precision_modules
from ..sharding.options import FSDPOptions
from ..sharding.sharded_parameter import local
from ..sharding.sharded_tensor import (
    ParameterSlot,
    ShardedTensor,
    raise_replaced,
    release,
    sharded_tensor_of,
)
from ..sharding.state import FSDPState, mark_sharded
from ..sharding.user_checks import require_shardable_parameters, warn_if_memory_is_shared
from .checks import describe, require_same, require_same_attributes


@dataclass(eq=False)
class Stack:
    """One buffer or parameter of all blocks.

    Attributes:
        names: dotted names in a block; a shared parameter has several.
        uses: modules of the template that use it, and their attribute names.
        layout: how a block's parameter is cut; ``None`` for a buffer.
        shared: whether a buffer is the same tensor in all blocks, and therefore not stacked.
        former_dtype: of a buffer that was cast.
        pieces: the buffer or shard of each block, until they are stacked.
        late: names of what has no values, by its offset in the stack.
    """

    names: list[str]
    uses: list[tuple[nn.Module, str]]
    layout: Layout | None = None
    wide: bool = False
    shared: bool = False
    former_dtype: torch.dtype | None = None
    pieces: list[torch.Tensor] = field(default_factory=list)
    late: dict[Key, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]

    def names_in_blocks(self, path: str, depth: int) -> list[tuple[str, ...]]:
        """Its dotted names in each of ``depth`` blocks, which ``path`` runs."""
        return [
            tuple(dotted(path, dotted(str(number), name)) for name in self.names)
            for number in range(depth)
        ]

    @property
    def value(self) -> Any:
        """A buffer, stacked unless shared, or a stacked shard; in the loop a full parameter."""
        module, name = self.uses[0]
        value = (module._buffers if self.layout is None else module._parameters).get(name)
        if value is None:
            raise_replaced(self.name)
        return value

    def put(self, value: torch.Tensor) -> None:
        for module, name in self.uses:
            (module._buffers if self.layout is None else module._parameters)[name] = value  # type: ignore[assignment]


class ScanUnit(FSDPState):
    """The shards of ``depth`` equal blocks, each stacked over the blocks.

    ``tensors`` and ``slots`` describe every block, without values. ``shards`` are the stacked
    parameters, attributes of the template block.
    """

    def __init__(self, options: FSDPOptions, world: World, template: nn.Module) -> None:
        super().__init__(options, world, template)
        self.depth: int = 0
        self.stored: list[ShardedTensor] = []
        self.parameters: list[Stack] = []
        self.buffers: list[Stack] = []
        if world.as_on_tpu:
            self.linears = linear.layers_in(template.modules())

    @property
    def sources(self) -> list[torch.Tensor]:
        """The stacked shards, or their copies on the device."""
        return [tensor.source for tensor in self.stored]

    def describe_blocks(self, depth: int) -> None:
        """Fills in ``stored``, ``tensors`` and ``slots``."""
        self.depth = depth
        for stack in self.parameters:
            assert stack.layout is not None
            stored = ShardedTensor(stack.value, stack.layout, stack.name, wide=stack.wide)
            stored.world, stored.comms = self.world, self.comms
            self.stored.append(stored)
        for block in map(str, range(depth)):
            for stack, stored in zip(self.parameters, self.stored, strict=True):
                row = torch.empty_like(local(stack.value)[0], device="meta")
                row = nn.Parameter(row, requires_grad=stack.value.requires_grad)
                key = dotted(block, stack.name)
                index = self.add_tensor(replace(stored, shard=row, key=key, world=None, comms=None))
                for module, name in stack.uses:
                    mark_sharded(module)
                    self.slots.append(ParameterSlot(module, name, index, stack.value, block))

    def gather_block(
        self,
        shards: Sequence[torch.Tensor],
        x: torch.Tensor,
        order: Order,
        secondary: SecondaryShards | None = None,
    ) -> list[torch.Tensor]:
        """The full parameters of one block in compute dtype, from its shards.

        Ties the shards to ``x``, of the carry: otherwise the compiler casts all blocks before the
        loop, and shards are in memory twice. ``order``: earlier gathers.
        """
        if secondary is not None and secondary.pieces:
            tied = after(list(secondary.pieces.values()), [x])
            pieces = dict(zip(secondary.pieces, tied, strict=True))
            secondary = replace(secondary, pieces=pieces)
        else:
            shards = after(shards, [x])
        return self.comms.trace_gathers(self._block(shards), order, (), False, secondary)

    def order_after(self, event: torch.Tensor) -> Order:
        order = Order()
        if self.world.as_on_tpu and event.numel():
            order.add_gather(event)
        return order

    def after_reductions(
        self, tensor: torch.Tensor, shares: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """``tensor``, tied to the end of the reductions of ``shares`` that nothing can overlap."""
        if self.world.as_on_tpu:
            for share in shares:
                # An upper bound of the bytes.
                full = self.world.size * share.numel() * share.dtype.itemsize
                if not self.world.overlaps_reductions(full):
                    tensor = self.order_after(share).delay(tensor)
        return tensor

    def secondary(self, pieces: Mapping[int, torch.Tensor] | None = None) -> SecondaryShards | None:
        """One block's second shards; ``None`` if the backward gathers from the shards."""
        if self.secondary_world is None:
            return None
        return SecondaryShards(self.secondary_world, pieces=dict(pieces or {}))

    def reduce_block(
        self, shards: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """Gradient shards of one block, by parameter number, for those with a gradient.

        If nothing follows the reduction, they keep its dtype, which halves the stack.
        """
        present = {number: [grad] for number, grad in enumerate(grads) if grad is not None}
        fulls = self.comms.join_gradients(self._block(shards), present, {})
        exact = self.comms.hook is None and scales_in_collective(self.comms.divisors, self.world)
        tensors = self._block(
            shard.to(fulls[number].dtype) if exact and number in fulls else shard
            for number, shard in enumerate(shards)
        )
        return self.comms.trace_reductions(tensors, fulls)[0] if fulls else {}

    def names_of(self, tensor: ShardedTensor, members: int) -> list[str]:
        return [self.comms.label + tensor.key]

    @contextlib.contextmanager
    def installed(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Within, the template uses these full parameters and buffers."""
        stacks = [*self.parameters, *self.buffers]
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
            replace(stored, shard=shard, world=None, copy=None, comms=None)  # type: ignore[arg-type]
            for shard, stored in zip(shards, self.stored, strict=True)
        ]


class ScanBuilder(Builder):
    """Takes blocks one at a time, so that only one full block must exist."""

    def __init__(self, options: FSDPOptions, world: World):
        super().__init__(options, world)
        self.ignore = frozenset(options.ignore)
        self.on_device = False
        self._template: nn.Module | None = None
        self._described: dict = {}
        self._stacks: list[Stack] = []
        # Keeps parameters alive, so that identities stay unique.
        self._seen: dict[nn.Parameter, int] = {}

    def build(self, blocks: Iterable[nn.Module]) -> ScanUnit:
        if not isinstance(blocks, Iterable):
            raise TypeError(
                f"blocks must be an iterable of modules, got {type(blocks).__name__}. Pass a list"
            )
        checked: Iterable[nn.Module] = (
            self._checked(block, number) for number, block in enumerate(blocks)
        )
        if not isinstance(blocks, Iterator):
            checked = list(checked)  # if one raises, no block has been changed
            warn_if_memory_is_shared(
                {
                    parameter: dotted(str(number), name)
                    for number, block in enumerate(checked)
                    for name, parameter in block.named_parameters()
                }
            )
        depth = 0
        for block in checked:
            self._take(block, depth)
            depth += 1
        if self._template is None:
            raise ValueError("scan_blocks needs at least one block, got none. Pass the blocks")
        unit = ScanUnit(self.options, self.world, self._template)
        for stack in self._stacks:
            if stack.layout is not None:
                self._stack_shards(stack)
                unit.parameters.append(stack)
            else:
                self._stack_buffer(stack)
                unit.buffers.append(stack)
            stack.pieces.clear()
            if stack.late:
                use = stack.uses[0] if stack.layout is None else None
                unit.uninitialized.append(UninitializedTensor(stack.value, stack.late, use))
        if self.options.mixed_precision is not None:
            compute_in_float32(self.options.mixed_precision, list(self._template.modules()))
        unit.describe_blocks(depth)
        unit.mark_shards()
        return unit

    def _checked(self, block: nn.Module, number: int) -> nn.Module:
        if not isinstance(block, nn.Module):
            raise TypeError(f"block {number} must be a torch.nn.Module, got {type(block).__name__}")
        if any(is_wrapper(module) for module in block.modules()):
            raise ValueError(
                f"block {number} is wrapped, or contains wrapped modules, but scan_blocks shards "
                "the blocks itself. Pass blocks that are not wrapped"
            )
        if "forward" in vars(block):
            raise ValueError(
                f"the forward of block {number} was replaced ({vars(block)['forward']!r}), which "
                "scan_blocks does not support. Pass the original blocks: scan_blocks recomputes "
                "each in the backward, as checkpoint_module does"
            )
        for name, parameter in block.named_parameters():
            other = self._seen.setdefault(parameter, number)
            if other != number or sharded_tensor_of(parameter) is not None:
                sharer = "a wrapped module" if other == number else f"block {other}"
                raise ValueError(
                    f"block {number} shares the parameter {name} with {sharer}, which scanned "
                    "blocks do not support. Untie it, or wrap each block separately"
                )
        for path, module in block.named_modules():
            require_shardable_parameters(dotted(str(number), path), module)
        described = describe(block)
        if self._template is None:
            self._template, self._described = block, described
            known = {ATTENTION, *(name for name, _ in block.named_modules() if name)}
            if unknown := [name for name in self.options.keep if name not in known]:
                raise ValueError(
                    f"keep={unknown[0]!r} is not a submodule of the blocks. Allowed are "
                    f"{', '.join(sorted(known))}"
                )
        require_same(self._described, described, number)
        return block

    def _take(self, block: nn.Module, number: int) -> None:
        self.on_device |= any(p.device.type == "xla" for p in block.parameters())
        for _ in materialize(block, self.options.param_init_fn):
            pass
        assert self._template is not None
        require_same_attributes(self._template, block, number, self.ignore)
        if block is self._template:
            self._find_stacks(block)
        for stack in self._stacks:
            name, layout = stack.name, stack.layout
            if layout is None:
                tensor, first = block.get_buffer(name), number
                stack.pieces.append(tensor)
            else:
                tensor = block.get_parameter(name)
                first = number * torch.Size(layout.shard_shape).numel()
                stack.pieces.append(self._cut(tensor, layout))
            if is_deferred(tensor):  # a load gives it values
                stack.late[first, 0] = dotted(str(number), name)

    def _find_stacks(self, block: nn.Module) -> None:
        uses: dict[torch.Tensor, dict[tuple[nn.Module, str], None]] = {}
        names: dict[torch.Tensor, list[str]] = {}
        for path, module in block.named_modules(remove_duplicate=False):
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    uses.setdefault(tensor, {})[module, name] = None
                    names.setdefault(tensor, []).append(dotted(path, name))
        if self.options.mixed_precision is not None:
            self.wide = full_precision_modules(self.options.mixed_precision, block.modules())
        for tensor, known in names.items():
            stack = Stack(known, list(uses[tensor]))
            if isinstance(tensor, nn.Parameter):
                stack.layout = self.layout_of(tensor)
                stack.wide = stack.uses[0][0] in self.wide
            self._stacks.append(stack)

    @torch.no_grad()
    def _cut(self, parameter: nn.Parameter, layout: Layout) -> torch.Tensor:
        shard = own_shard(layout, [self.agreed(parameter.detach())], self.world)
        release(parameter)
        return shard

    def _stack_shards(self, stack: Stack) -> None:
        of_template, first = stack.value, stack.pieces[0]
        with torch.no_grad():
            if is_simulated_rank() and len(stack.pieces) * first.numel() >= LARGE:
                values = fake_cpu_tensor((len(stack.pieces), *first.shape), first.dtype)
            else:
                values = torch.stack(stack.pieces)
            parameter = self.stored(values, of_template.requires_grad)
        parameter.__dict__.update(of_template.__dict__)  # what users have set
        stack.put(parameter)

    def _stack_buffer(self, stack: Stack) -> None:
        agreed = {id(buffer): self.agreed(buffer) for buffer in stack.pieces}
        buffers = [agreed[id(buffer)] for buffer in stack.pieces]
        first = buffers[0]
        dtype = self.dtype_of(first, (module for module, _ in stack.uses))
        if dtype is not first.dtype:
            stack.former_dtype = first.dtype
        stack.shared = len(buffers) > 1 and all(buffer is first for buffer in buffers)
        value = first if stack.shared else torch.stack(buffers)
        stack.put(value.to(device=self.world.device, dtype=dtype))
