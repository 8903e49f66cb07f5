"""What this rank holds of a model, in terms of the unsharded model.

Whatever the wrapping (nested, auto, flat, scanned, none), a rank holds of every parameter a run of
consecutive elements of it, flattened. That is all that a checkpoint needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch_xla.runtime as xr
from torch import nn

from ..collectives.world import World
from ..consolidate.format.manifest import Span
from ..names import dotted
from ..sharding.around import name_held_outside
from ..sharding.layout import Layout
from ..sharding.metadata import sharded_names
from ..sharding.state import unit_of, units_in
from ..sharding.unit import NamedUnits


@dataclass(frozen=True, eq=False)
class Held:
    """One parameter of the unsharded model, and the part of it that this rank holds.

    Attributes:
        names: its dotted name, and those of parameters tied to it.
        shape, dtype: of the whole parameter, as it is stored (not as it is computed with).
        begin, end: the flattened elements that are here.
        at: which flattened element of ``holder`` element ``begin`` is.
        holder: the parameter that the optimizer sees: a shard, a vector or stack of several
            parameters' shards, or the whole parameter where nothing is sharded.
        writes: whether this rank's copy is the one to save; others may have the same.
        layout, member, world: how the holder was cut, ``None`` if it was not.
        first: which flattened element of ``holder`` its layout begins at.
        span: who writes what of it, ``None`` if no rule says.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int
    at: int
    holder: nn.Parameter
    writes: bool
    layout: Layout | None = None
    member: int = 0
    first: int = 0
    world: World | None = None
    span: Span | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return torch.Size(self.shape).numel()

    @property
    def length(self) -> int:
        """Elements that are here."""
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class HeldBuffer:
    """One persistent buffer, whole on every rank.

    Attributes:
        tensor: the buffer, or the stack of it that scanned blocks keep; then ``row`` says which.
        restore: the dtype it had before it was cast for computing, ``None`` if it was not.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    restore: torch.dtype | None = None
    row: int | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dtype(self) -> torch.dtype:
        """That before wrapping."""
        return self.restore or self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape if self.row is None else self.tensor.shape[1:])

    def value(self) -> torch.Tensor:
        """On the CPU, in the dtype that it had before wrapping."""
        # To the CPU first: on the device every row would be a program of its own.
        value = self.tensor.detach().cpu()
        value = value if self.row is None else value[self.row]
        return value.to(self.dtype)


@dataclass(frozen=True)
class Inventory:
    """A model as this rank has it; ``extra_state``: modules that implement ``get_extra_state``."""

    parameters: tuple[Held, ...]
    buffers: tuple[HeldBuffer, ...]
    extra_state: dict[str, nn.Module]
    rank: int
    world_size: int

    def by_holder(self) -> dict[nn.Parameter, list[Held]]:
        """The parameters in each tensor that an optimizer sees."""
        found: dict[nn.Parameter, list[Held]] = {}
        for held in self.parameters:
            found.setdefault(held.holder, []).append(held)
        return found


def take_inventory(model: nn.Module) -> Inventory:
    """Raises:
    TypeError: ``model`` is no module.
    ValueError: it is sharded over groups whose copies are independent of each other, or has
        parameters on the meta device, or parameters that a wrapper around it holds.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    units = units_in(model)
    for _, unit in units:
        unit.settle()  # what an exception in a forward left behind
    outside = name_held_outside(model, [unit for _, unit in units])
    if outside is not None:
        raise ValueError(
            f"parameters of {outside!r} belong to a wrapper around the given module, which has "
            "only this rank's shards of them: give the wrapper (model, not model.module)"
        )
    rank, size = xr.global_ordinal(), xr.world_size()
    sharded = list(_sharded(units, rank, size))
    holders = {held.holder for held in sharded}
    # Names and parameters in the order of the unsharded model, whatever the wrapping.
    order = {name: i for i, name in enumerate(dict.fromkeys(_all_names(model)))}
    parameters = []
    for held in [*sharded, *_whole(model, holders, rank, size)]:
        if held.holder.is_meta:
            raise ValueError(f"parameter {held.name!r} is on the meta device: it has no values yet")
        names = sorted(held.names, key=lambda name: order.get(name, len(order)))
        parameters.append(replace(held, names=tuple(names)))
    parameters.sort(key=lambda held: order.get(held.name, len(order)))
    return Inventory(
        tuple(parameters),
        tuple(_buffers(model, units)),
        _with_extra_state(model, units),
        rank,
        size,
    )


def _sharded(units: NamedUnits, rank: int, size: int) -> Iterator[Held]:
    names = sharded_names(units)
    seen = set()
    for _, unit in units:
        for tensor, holder, first in unit.holders():
            if tensor in seen:  # shared by two units, or by two names of one
                continue
            seen.add(tensor)
            pieces = tensor.layout.pieces(unit.world.rank)
            chunk = math.prod(tensor.layout.shard_shape)
            for member, (begin, end, at) in enumerate(pieces):
                if not names[tensor][member]:  # of a module that was removed since
                    continue
                yield Held(
                    names=tuple(names[tensor][member]),
                    shape=tensor.layout.members[member].shape,
                    dtype=holder.dtype,
                    begin=begin,
                    end=end,
                    at=first + at,
                    holder=holder,
                    writes=_writes(unit.world, rank, size),
                    layout=tensor.layout,
                    member=member,
                    first=first,
                    world=unit.world,
                    span=_span(unit.world, chunk, tensor.layout.members[member].offset),
                )


def _writes(world: World, rank: int, size: int) -> bool:
    if world.size == size:
        return True
    if len(world.groups) > 1 and not world.replica_groups:
        raise ValueError(
            f"the model is sharded over groups of {world.size} of {size} ranks without "
            "replication_groups, so its copies may differ; pass replication_groups if they are "
            "replicas, or save every rank's state_dict() and get_shard_metadata() by hand"
        )
    return rank in world.groups[0]


def _span(world: World, chunk: int, offset: int) -> Span | None:
    writers = world.groups[0]
    step = writers[1] - writers[0] if len(writers) > 1 else 1
    if step < 1 or list(writers) != list(range(writers[0], writers[-1] + 1, step)):
        return None
    return Span(writers[0], step, max(chunk, 1), offset)


def _whole(model: nn.Module, holders: set, rank: int, size: int) -> Iterator[Held]:
    """Parameters that nothing shards; the work of writing them goes round the ranks."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in holders:
                names.setdefault(parameter, []).append(dotted(path, name))
    for number, (parameter, own) in enumerate(names.items()):
        length = parameter.numel()
        yield Held(
            names=tuple(dict.fromkeys(own)),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            begin=0,
            end=length,
            at=0,
            holder=parameter,
            writes=number % size == rank,
            span=Span(number % size, 1, max(length, 1), 0),
        )


def _buffers(model: nn.Module, units: NamedUnits) -> Iterator[HeldBuffer]:
    casts = {
        dotted(path, name): dtype
        for path, unit in units
        for name, dtype in unit.buffer_dtypes.items()
    }
    stacks = {}
    for path, unit in units:
        for stack in unit.buffers:  # scanned blocks
            stacks[id(stack.value)] = path, unit.depth or 1, stack
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                own = found.setdefault(id(buffer), (buffer, []))[1]
                own.append(dotted(path, name))
    for identity, (buffer, own) in found.items():
        if identity not in stacks:
            names = tuple(dict.fromkeys(own))
            yield HeldBuffer(names, buffer, casts.get(names[0]))
            continue
        path, depth, stack = stacks[identity]
        blocks = [
            tuple(dotted(path, dotted(str(number), name)) for name in stack.names)
            for number in range(depth)
        ]
        if stack.shared:
            names = tuple(name for each in blocks for name in each)
            yield HeldBuffer(names, buffer, casts.get(names[0]))
        else:
            for row, names in enumerate(blocks):
                yield HeldBuffer(names, buffer, casts.get(names[0]), row)


def _with_extra_state(model: nn.Module, units: NamedUnits) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    scanned: set[nn.Module] = set()
    for path, unit in units:
        if unit.depth:  # one module for all blocks of a scan
            scanned.update(unit.module.modules())
            for block in range(unit.depth):
                for inside, module in unit.module.named_modules(remove_duplicate=False):
                    found[dotted(path, dotted(str(block), inside))] = module
    for path, module in model.named_modules(remove_duplicate=False):
        if module not in scanned:
            found[path] = module
    return {
        dotted(path, "_extra_state"): module
        for path, module in found.items()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _all_names(model: nn.Module) -> Iterator[str]:
    """Names of parameters, in the order of ``named_parameters()`` of the unsharded model."""
    for path, module in model.named_modules(remove_duplicate=False):
        unit = unit_of(module)
        if unit is not None and unit.depth:  # scanned: no modules of their own
            for _, inside in unit.named_places():
                for own in inside:
                    yield dotted(path, own)
        for name in module._parameters:
            yield dotted(path, name)
