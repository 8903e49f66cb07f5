"""Lists which elements of each parameter of the unsharded model this rank stores.

With any wrapping, they are one range of the flattened parameter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import nn

from ..collectives.world import World
from ..consolidate.format.manifest import ShardingRule
from ..names import dotted
from ..sharding.layout import Layout
from ..sharding.metadata import sharded_names
from ..sharding.sharded_parameter import local
from ..sharding.state import find_sharded_outside, unique_units, unit_of, units_in
from ..sharding.unit import NamedUnits, paths_of
from ..sharding.user_checks import require_unscanned
from .rank_exchange import RankExchange

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """One parameter of the unsharded model, and the part of it that this rank stores.

    Attributes:
        names: its dotted name, then the names of parameters tied to it.
        shape, dtype: of the full parameter, in the dtype of storage (not of computation).
        begin, end: this rank stores the flattened elements ``begin <= i < end``.
        at: index in the flattened ``holder`` of the element ``begin``.
        holder: the parameter that the optimizer sees: a shard, a vector or stack of the shards of
            several parameters, or the full parameter if it is not sharded.
        writes: whether this rank saves its copy. Other ranks may have the same elements.
        layout, world: how the holder is sharded, ``None`` if it is not.
        member: number of this parameter in the layout.
        first: index in the flattened ``holder`` at which its layout begins.
        sharding_rule: ``None`` if no rule says which rank saves which elements.
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
    sharding_rule: ShardingRule | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class ReplicatedBuffer:
    """One persistent buffer, replicated on every rank.

    Attributes:
        names: its dotted name, then the names of buffers tied to it.
        tensor: the buffer, or for scanned blocks the stack of the blocks' buffers.
        restore: the original dtype of a buffer that was cast for computing.
        row: index of this buffer in the stack, ``None`` without a stack.
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
        """The dtype before wrapping."""
        return self.restore or self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape if self.row is None else self.tensor.shape[1:])

    def value(self) -> torch.Tensor:
        """The value on the CPU, in the dtype from before wrapping. It may be the buffer itself."""
        # On the device, selecting a row would compile one program per row.
        value = self.tensor.detach().cpu()
        value = value if self.row is None else value[self.row]
        return value.to(self.dtype)

    def copy_to(self, device: torch.device) -> torch.Tensor:
        return self.value().to(device, copy=True)


Entry = ParameterShard | ReplicatedBuffer


@dataclass(frozen=True)
class Inventory:
    """``extra_state``: the modules that implement ``get_extra_state``, by key of the state dict."""

    parameters: tuple[ParameterShard, ...]
    buffers: tuple[ReplicatedBuffer, ...]
    extra_state: dict[str, nn.Module]
    rank: int
    world_size: int

    def by_holder(self) -> dict[nn.Parameter, list[ParameterShard]]:
        found: dict[nn.Parameter, list[ParameterShard]] = {}
        for shard in self.parameters:
            found.setdefault(shard.holder, []).append(shard)
        return found

    def parts(self) -> list[list[ParameterShard]]:
        """The parameters that one collective gathers, in the order of the unsharded model."""
        found: dict[tuple, list[ParameterShard]] = {}
        for shard in self.parameters:
            found.setdefault((shard.holder, shard.first), []).append(shard)
        return list(found.values())

    def entries(self) -> tuple[Entry, ...]:
        return (*self.parameters, *self.buffers)


def make_inventory(model: nn.Module) -> Inventory:
    """Lists what this rank stores of ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is sharded over groups of ranks whose copies may differ, has tensors
            on the meta device, or is inside a wrapper that shards its parameters.
        RuntimeError: a scanned block has a name outside of the blocks.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the wrapped model."
        )
    units = units_in(model)
    for _, unit in units:
        unit.reset_after_failure()  # a forward may have failed
    outside = find_sharded_outside(model, [unit for _, unit in units])
    if outside is not None:
        raise ValueError(
            f"parameters of {outside!r} belong to a wrapper around the given module. Inside the "
            "wrapper there are only this rank's shards. Pass the wrapper (model, not model.module)."
        )
    paths = paths_of(model)
    for unit in unique_units(model):
        if unit.depth:
            own = [at and f"{at}." for at, one in units if one is unit]
            for path in chain(*(paths.get(module, ()) for module in unit.module.modules())):
                if not f"{path}.".startswith(tuple(own)):
                    require_unscanned(path, unit)
    rank, size = xr.global_ordinal(), xr.world_size()
    sharded = list(_sharded(paths, units, rank, size))
    holders = {shard.holder for shard in sharded}
    order = {name: i for i, name in enumerate(dict.fromkeys(_all_names(model)))}
    parameters = []
    for shard in [*sharded, *_unsharded_parameters(model, holders, rank, size)]:
        _require_values(f"parameter {shard.name!r}", shard.holder)
        names = sorted(shard.names, key=lambda name: order.get(name, len(order)))
        parameters.append(replace(shard, names=tuple(names)))
    parameters.sort(key=lambda shard: order.get(shard.name, len(order)))
    buffers = tuple(_find_buffers(model, units))
    for buffer in buffers:
        _require_values(f"buffer {buffer.name!r}", buffer.tensor)
    return Inventory(
        tuple(parameters),
        buffers,
        _with_extra_state(model, units),
        rank,
        size,
    )


def _require_values(what: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"{what} is on the meta device, so it has no values. Move it to a device and "
            "initialize it first."
        )


def _sharded(
    paths: Mapping[nn.Module, list[str]], units: NamedUnits, rank: int, size: int
) -> Iterator[ParameterShard]:
    names = sharded_names(paths, units)
    seen = set()
    for _, unit in units:
        for tensor, holder, first in unit.holders():
            if tensor in seen:  # of two units, or under two names
                continue
            seen.add(tensor)
            world = unit.world
            if len(world.groups) > 1 and not world.replica_groups:
                raise ValueError(
                    f"the model is sharded over groups of {world.size} of {size} ranks without "
                    "replication_groups, so the copies of different groups may differ. To save it, "
                    "pass replication_groups if the groups are replicas, or save state_dict() and "
                    "get_shard_metadata() of every rank yourself."
                )
            pieces = tensor.layout.pieces(world.rank)
            chunk = math.prod(tensor.layout.shard_shape)
            for member, (begin, end, at) in enumerate(pieces):
                if not names[tensor][member]:  # its module was removed
                    continue
                full = tensor.layout.members[member]
                yield ParameterShard(
                    names=tuple(names[tensor][member]),
                    shape=full.shape,
                    dtype=holder.dtype,
                    begin=begin,
                    end=end,
                    at=first + at,
                    holder=holder,
                    writes=rank in world.groups[0],
                    layout=tensor.layout,
                    member=member,
                    first=first,
                    world=world,
                    sharding_rule=_sharding_rule(world, chunk, full.offset),
                )


def _sharding_rule(world: World, chunk: int, offset: int) -> ShardingRule | None:
    writers = world.groups[0]
    step = writers[1] - writers[0] if len(writers) > 1 else 1
    if step < 1 or list(writers) != list(range(writers[0], writers[-1] + 1, step)):
        return None
    return ShardingRule(writers[0], step, max(chunk, 1), offset)


def _unsharded_parameters(
    model: nn.Module, holders: set, rank: int, size: int
) -> Iterator[ParameterShard]:
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in holders:
                names.setdefault(parameter, []).append(dotted(path, name))
    for number, (parameter, own) in enumerate(names.items()):
        length = parameter.numel()
        yield ParameterShard(
            names=tuple(dict.fromkeys(own)),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            begin=0,
            end=length,
            at=0,
            holder=parameter,
            writes=number % size == rank,
            sharding_rule=ShardingRule(number % size, 1, max(length, 1), 0),
        )


def _find_buffers(model: nn.Module, units: NamedUnits) -> Iterator[ReplicatedBuffer]:
    casts = {key: dtype for _, unit in units for key, dtype in unit.buffer_dtypes.items()}
    stacks = {}
    for path, unit in units:
        for stack in unit.buffers:
            stacks[id(stack.value)] = path, unit.depth or 1, stack
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    former: dict[int, torch.dtype] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                own = found.setdefault(id(buffer), (buffer, []))[1]
                own.append(dotted(path, name))
                if (module, name) in casts:
                    former[id(buffer)] = casts[module, name]
    for identity, (buffer, own) in found.items():
        if identity not in stacks:
            names = tuple(dict.fromkeys(own))
            yield ReplicatedBuffer(names, buffer, former.get(identity))
            continue
        path, depth, stack = stacks[identity]
        blocks = stack.names_in_blocks(path, depth)
        if stack.shared:
            names = tuple(name for each in blocks for name in each)
            yield ReplicatedBuffer(names, buffer, stack.former_dtype)
        else:
            for row, names in enumerate(blocks):
                yield ReplicatedBuffer(names, buffer, stack.former_dtype, row)


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
        if unit is not None and unit.depth:
            for _, inside in unit.named_slots():
                for own in inside:
                    yield dotted(path, own)
        for name, _ in module._parameters.items():  # one of torch.jit is no dict
            yield dotted(path, name)


def agree_on_inventory(exchange: RankExchange, model: nn.Module) -> Inventory:
    """:func:`make_inventory`. Raises MetadataMismatchError if the models of two ranks differ."""

    def make() -> tuple[Inventory, str]:
        made = make_inventory(model)
        described: list[tuple] = [
            (h.names, h.shape, str(h.dtype), h.layout, h.first) for h in made.parameters
        ]
        described += [(b.names, b.shape, str(b.tensor.dtype), b.row) for b in made.buffers]
        text = repr([described, list(made.extra_state)])
        return made, hashlib.sha256(text.encode()).hexdigest()

    return exchange.run_and_compare(
        "inspect its model",
        make,
        "rank {rank} has another model than rank 0. Names, shapes, dtypes and wrapping of all "
        "parameters and buffers must be equal on every rank.",
    )


def gather_members(
    members: Sequence[ParameterShard], value: torch.Tensor, to: torch.device | None
) -> dict[Entry, torch.Tensor]:
    """Gathers the full tensors of ``members`` on the device ``to``. Call it on every rank.

    ``members``: an element of :meth:`Inventory.parts`. ``value``: this rank's shard, of the shape
    of their holder. With ``None`` for ``to``, a rank only takes part in the collective.
    """
    value, layout = local(value).detach(), members[0].layout
    full = value if layout is None else _gather(members[0], value)
    if to is None:
        return {}
    if layout is None:
        return {members[0]: value.to(to, copy=True)}
    if to != CPU:
        tensors = layout.split(full)
        torch_xla.sync(wait=True)
        return {shard: tensors[shard.member] for shard in members}
    # Padding is at the end in both layouts.
    flat = full.cpu().view(-1)
    found: dict[Entry, torch.Tensor] = {}
    for shard in members:
        offset = layout.members[shard.member].offset
        piece = flat[offset : offset + shard.numel].view(shard.shape)
        found[shard] = piece if shard.numel == flat.numel() else piece.clone()
    return found


def _gather(first: ParameterShard, value: torch.Tensor) -> torch.Tensor:
    layout, world = first.layout, first.world
    assert layout is not None and world is not None
    count = torch.Size(layout.shard_shape).numel()
    if count == 0:
        return value.new_zeros(layout.padded_shape, device=world.device)
    shard = value.reshape(-1, count)
    if len(shard) > 1:
        # On the device, an index that is a constant would compile a program per block.
        block = torch.tensor([first.first // count], device="cpu").to(value.device)
        shard = torch.index_select(shard, 0, block)
    shard = shard.to(world.device)
    full = world.all_gather(shard.view(layout.comm_shape), first.name)
    del shard
    torch_xla.sync(wait=True)
    return full
