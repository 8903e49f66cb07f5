"""Turns the parameters of a module into the sharded tensors of an FSDP unit."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..collectives.host_data import LARGE, fake_cpu_tensor
from ..collectives.world import World, broadcast_from_first
from ..layers import linear
from ..names import dotted, is_wrapper
from ..ranks.rank import is_simulated_rank
from .cpu_offload import HostShard, on_host
from .deferred_values import UninitializedTensor, is_deferred, is_on_meta, materialize
from .freeing import stamps
from .ignored import ignored_mark_of, is_ignored, move_ignored
from .layout import Layout
from .metadata import import_local_tensors
from .mixed_precision import compute_in_float32, full_precision_modules
from .options import FSDPOptions
from .sharded_tensor import (
    FlattenedParameter,
    ParameterSlot,
    ShardedTensor,
    mark_shards,
    member_number_of,
    release,
    set_sharded_tensor,
    sharded_tensor_of,
)
from .state import FSDPState, WrapperReference, mark_sharded, unique_units
from .user_checks import require_shardable_parameters, require_unscanned, warn_if_memory_is_shared

SAMPLE = 1 << 16


class Builder:
    """Common part of the builders. ``wide``: modules whose parameters and buffers are not cast."""

    def __init__(self, options: FSDPOptions, world: World) -> None:
        self.options = options
        self.world = world
        self.wide: set[nn.Module] = set()

    def layout_of(self, parameter: nn.Parameter) -> Layout:
        if self.options.shard_param_on_dim_0 and parameter.dim() > 0:
            return Layout.rows(parameter.shape, self.world.size)
        return Layout.flat([parameter.shape], self.world.size)

    def agreed(self, value: torch.Tensor) -> torch.Tensor:
        return broadcast_from_first(self.world, value) if self.options.sync_module_states else value

    def stored(self, shard: torch.Tensor, trained: bool) -> nn.Parameter:
        if self.options.cpu_offload is None:
            return nn.Parameter(shard.to(self.world.device), requires_grad=trained)
        return HostShard(on_host(shard), requires_grad=trained)

    def dtype_of(self, buffer: torch.Tensor, modules: Iterable[nn.Module]) -> torch.dtype:
        """The dtype to which ``buffer`` of ``modules`` is cast."""
        options = self.options
        dtype = options.buffer_dtype or (None if options.mixed_precision else options.compute_dtype)
        if dtype is None or not buffer.is_floating_point():
            return buffer.dtype
        for module in modules:
            declared = getattr(type(module), "fsdp_keeps_buffer_dtypes", False)
            if declared or module in self.wide or is_ignored(module):
                return buffer.dtype
        return dtype


class UnitBuilder(Builder):
    """Shards the parameters in ``module`` that no wrapper inside it has sharded yet.

    ``owner``: the wrapper, on which flattened parameters are registered, or ``module`` in place.
    """

    def __init__(self, module: nn.Module, owner: nn.Module, options: FSDPOptions, world: World):
        super().__init__(options, world)
        self.module = module
        self.owner = owner
        self.unit = FSDPState(options, world, module)
        self.unit.in_place = owner is module
        self.paths: dict[nn.Module, list[str]] = {}
        # Members that have no values until a load, see deferred_values.py.
        self.late: dict[ShardedTensor, list[int]] = {}

    def build(self) -> FSDPState:
        for path, module in self._modules():
            self.paths.setdefault(module, []).append(path)
        warn_if_memory_is_shared(
            {
                parameter: dotted(paths[0], name)
                for module, paths in self.paths.items()
                for name, parameter in self._own_parameters(module)
                if sharded_tensor_of(parameter) is None
            }
        )
        if self.options.mixed_precision is not None:
            self.wide = full_precision_modules(self.options.mixed_precision, self.paths)
            compute_in_float32(self.options.mixed_precision, self.paths)
        ready: Iterable[nn.Module] = self.paths
        on_meta = any(map(is_on_meta, self.paths))
        if on_meta:
            # In place, a module without reset_parameters does not raise, as in torch.
            waits = self.unit.in_place
            every = materialize(self.module, self.options.param_init_fn, waits)
            ready = (module for module in every if module in self.paths)
        if self.options.flatten_parameters:
            for _ in ready:
                pass
            self._flatten()
        else:
            # Shard a submodule as soon as it has values: only one is full at any time.
            for module in ready:
                for name, parameter in self._own_parameters(module):
                    if sharded_tensor_of(parameter) is None:
                        key = dotted(self.paths[module][0], name)
                        layout = self.layout_of(parameter)
                        self._shard([parameter], layout, key, module in self.wide)
                    self._put(module, name, parameter)
        if on_meta:
            # Initialization has its own order; restore the module's.
            order = {module: number for number, module in enumerate(self.paths)}
            self.unit.slots.sort(key=lambda slot: order[slot.module])
        for module, paths in self.paths.items():
            self.unit.ignored += move_ignored(paths[0], module, self.world.device)
        for tensor, members in self.late.items():
            first = self.unit.add_tensor(tensor)
            names = {(0, member): self.unit.name_of(first + member) for member in members}
            self.unit.uninitialized.append(UninitializedTensor(tensor.shard, names))
        sharded = {slot.module: None for slot in self.unit.slots}
        self.unit.rnns = [module for module in sharded if isinstance(module, nn.RNNBase)]
        self.unit.refresh_rnns()
        if self.world.as_on_tpu:
            layers = linear.layers_in(self.paths)
            self.unit.linears = {m: heads for m, heads in layers.items() if m in sharded}
        self._move_buffers()
        reference = WrapperReference(self.owner)
        for module in sharded:
            mark_sharded(module, reference)
            module.register_load_state_dict_pre_hook(import_local_tensors)
        self.unit.initial_stamps = stamps(self.unit.shards)
        return self.unit

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules outside inner wrappers, once for each path, parents first.

        Without those that an inner wrapper shards and that have another path outside of it.
        """
        units = unique_units(self.module)
        sharded_inside = {slot.module: unit for unit in units for slot in unit.slots}
        stack = [("", self.module)]
        while stack:
            path, module = stack.pop()
            if is_wrapper(module):
                continue
            if module in sharded_inside:
                require_unscanned(path, sharded_inside[module])
                continue
            require_shardable_parameters(path, module)
            yield path, module
            for key, child in reversed(module._modules.items()):
                if child is not None:
                    stack.append((dotted(path, key), child))

    def _own_parameters(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in module._parameters.items()
            if parameter is not None and ignored_mark_of(parameter) is None
        ]

    def _flatten(self) -> None:
        uses = [(one, *named) for one in self.paths for named in self._own_parameters(one)]
        # Trainable first, then frozen. A vector has one dtype.
        groups: dict[tuple[bool, torch.dtype, bool], dict[nn.Parameter, None]] = {}
        taken: set[nn.Parameter] = set()
        for module, _, parameter in sorted(uses, key=lambda use: not use[2].requires_grad):
            if sharded_tensor_of(parameter) is None and parameter not in taken:
                taken.add(parameter)
                kind = parameter.requires_grad, parameter.dtype, module in self.wide
                groups.setdefault(kind, {})[parameter] = None
        for number, ((_, _, wide), parameters) in enumerate(groups.items()):
            layout = Layout.flat([p.shape for p in parameters], self.world.size)
            tensor = self._shard(list(parameters), layout, f"flat_param_{number}", wide)
            self.owner.register_parameter(tensor.key, tensor.shard)
            self.unit.flattened.append(tensor)
        for use in uses:
            self._put(*use)

    def _shard(
        self, parameters: Sequence[nn.Parameter], layout: Layout, key: str, wide: bool
    ) -> ShardedTensor:
        with torch.no_grad():
            values = [self.agreed(parameter.detach()) for parameter in parameters]
            self.unit.initial_checksum += sum(map(checksum, values))
            cut = own_shard(layout, values, self.world)
            shard = self.stored(cut, parameters[0].requires_grad)
        late = [number for number, one in enumerate(parameters) if is_deferred(one)]
        if not self.options.flatten_parameters:
            # Attributes that users set on a parameter ("no weight decay") move to the shard.
            shard.__dict__.update(parameters[0].__dict__)
        flattened = self.options.flatten_parameters
        tensor = ShardedTensor(shard, layout, key, flattened, wide, self.world)
        if flattened:
            tensor.attributes = [dict(vars(parameter)) for parameter in parameters]
        for number, parameter in enumerate(parameters):
            set_sharded_tensor(parameter, tensor, number)
            release(parameter)
        mark_shards([tensor])
        if late:
            self.late[tensor] = late
        return tensor

    def _put(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        tensor, number = sharded_tensor_of(parameter), member_number_of(parameter)
        assert tensor is not None, "a parameter must be sharded before it is added to its unit"
        slot = ParameterSlot(module, name, self.unit.add_tensor(tensor) + number, tensor.shard)
        if tensor.flattened:
            shape = torch.Size(tensor.layout.members[number].shape)
            called = dotted(self.paths[module][0], name)
            slot.shown = FlattenedParameter(shape, tensor.shard, self.unit.comms, called)
            slot.sharded_value = None
        self.unit.slots.append(slot)
        slot.restore_sharded()

    def _move_buffers(self) -> None:
        moved: dict[torch.Tensor, torch.Tensor] = {}
        for module in self.paths:
            for name, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                if buffer not in moved:
                    dtype = self.dtype_of(buffer, [module])
                    moved[buffer] = self.agreed(buffer).to(device=self.world.device, dtype=dtype)
                if moved[buffer].dtype is not buffer.dtype:
                    self.unit.buffer_dtypes[module, name] = buffer.dtype
                module._buffers[name] = moved[buffer]
                if is_deferred(buffer):
                    names = {(0, 0): dotted(self.paths[module][0], name)}
                    self.unit.uninitialized.append(
                        UninitializedTensor(moved[buffer], names, (module, name))
                    )


def own_shard(layout: Layout, values: Sequence[torch.Tensor], world: World) -> torch.Tensor:
    """This rank's shard; in a plan, without values if it is large."""
    if is_simulated_rank() and math.prod(layout.shard_shape) >= LARGE:
        return fake_cpu_tensor(layout.shard_shape, values[0].dtype)
    return layout.cut(values, world.rank)


def checksum(values: torch.Tensor) -> int:
    """CRC-32 of a sample of a CPU tensor; 0 if it is elsewhere or has no values."""
    if values.device.type != "cpu" or is_simulated_rank():
        return 0
    flat = values.detach().reshape(-1)
    return zlib.crc32(
        flat[:: max(1, flat.numel() // SAMPLE)].contiguous().view(torch.uint8).numpy().data
    )
