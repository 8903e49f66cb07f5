"""Turning the parameters of a module into the sharded tensors of a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from .batch_norm import SyncBatchNorm
from .init import is_on_meta, materialize
from .names import dotted
from .options import FSDPOptions
from .shard import Layout
from .swap import release_original_
from .unit import Place, ShardedTensor, Unit
from .world import World

# On a shard: the ShardedTensor it belongs to. On a parameter that has been sharded, but that other
# modules may still hold (tied weights): the ShardedTensor and the parameter's number in it.
_HOME = "_xla_fsdp_home"

Spot = tuple[nn.Module, str, nn.Parameter]


class UnitBuilder:
    """Shards what ``module`` holds and no wrapper inside it has sharded yet.

    Args:
        module: the module to be wrapped.
        owner: the wrapper, on which flattened parameters are registered.
        is_wrapper: tells wrappers, which are not looked into.
    """

    def __init__(
        self,
        module: nn.Module,
        owner: nn.Module,
        options: FSDPOptions,
        world: World,
        is_wrapper: Callable[[nn.Module], bool],
    ):
        self.module = module
        self.owner = owner
        self.options = options
        self.world = world
        self.is_wrapper = is_wrapper
        self.unit = Unit(options, world)
        # All names of every module, the first of which names its parameters.
        self.paths: dict[nn.Module, list[str]] = {}

    def build(self) -> Unit:
        for path, module in self._modules():
            self.paths.setdefault(module, []).append(path)
        ready = materialize(self.module, self.is_wrapper, self.options.param_init_fn)
        if self.options.flatten_parameters:
            for _ in ready:
                pass
            self._flatten()
        elif any(is_on_meta(module) for module in self.paths):
            # Sharded as soon as it has values, so that only one submodule is ever whole.
            for module in ready:
                self._shard_each(self._spots(module))
            # Places were registered in the order of initialisation; restore the module's order.
            order = {module: number for number, module in enumerate(self.paths)}
            self.unit.places.sort(key=lambda place: order[place.module])
        else:
            for module in self.paths:
                self._shard_each(self._spots(module))
        self._move_buffers()
        if self.options.compute_dtype is None and any(
            shard.dtype is torch.float16 for shard in self.unit.shards
        ):
            self.unit.wire.divide_in_float16()
        return self.unit

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules outside inner wrappers, with each of their paths, parents first."""
        stack = [("", self.module)]
        while stack:
            path, module = stack.pop()
            if self.is_wrapper(module):
                continue
            yield path, module
            children = [(k, c) for k, c in module._modules.items() if c is not None]
            stack.extend((dotted(path, key), child) for key, child in reversed(children))

    def _spots(self, module: nn.Module) -> Iterator[Spot]:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module, name, parameter

    def _shard_each(self, spots: Iterator[Spot]) -> None:
        for spot in spots:
            module, name, parameter = spot
            if not hasattr(parameter, _HOME):
                rows = self.options.shard_param_on_dim_0 and parameter.dim() > 0
                if rows:
                    layout = Layout.rows(parameter.shape, self.world.size)
                else:
                    layout = Layout.flat([parameter.shape], self.world.size)
                self._shard([parameter], layout, dotted(self.paths[module][0], name))
            self._put(spot)

    def _flatten(self) -> None:
        spots = [spot for module in self.paths for spot in self._spots(module)]
        # Trainable first, then frozen; a vector has one dtype. Each parameter once.
        groups: dict[tuple[bool, torch.dtype], dict[nn.Parameter, None]] = {}
        for *_, parameter in sorted(spots, key=lambda spot: not spot[2].requires_grad):
            if not hasattr(parameter, _HOME):
                groups.setdefault((parameter.requires_grad, parameter.dtype), {})[parameter] = None
        for number, parameters in enumerate(groups.values()):
            layout = Layout.flat([p.shape for p in parameters], self.world.size)
            tensor = self._shard(list(parameters), layout, f"flat_param_{number}")
            self.owner.register_parameter(tensor.key, tensor.shard)
        for spot in spots:
            self._put(spot)

    def _shard(self, parameters: Sequence[nn.Parameter], layout: Layout, key: str) -> ShardedTensor:
        with torch.no_grad():
            cut = layout.cut([p.detach() for p in parameters], self.world.rank)
            cut = cut.to(self.world.device)
            shard = nn.Parameter(cut, requires_grad=parameters[0].requires_grad)
        if not self.options.flatten_parameters:
            # What users hung on a parameter ("no weight decay", "expert") goes with it.
            shard.__dict__.update(parameters[0].__dict__)
        tensor = ShardedTensor(shard, layout, key, self.options.flatten_parameters)
        for number, parameter in enumerate(parameters):
            setattr(parameter, _HOME, (tensor, number))
            release_original_(parameter)
        setattr(shard, _HOME, (tensor, 0))
        return tensor

    def _put(self, spot: Spot) -> None:
        module, name, parameter = spot
        tensor, number = getattr(parameter, _HOME)
        first = self.unit.adopt(tensor)
        resting = None if tensor.flattened else tensor.shard
        self.unit.add_place(Place(tuple(self.paths[module]), module, name, first + number, resting))

    def _move_buffers(self) -> None:
        """Buffers to the device; floating-point ones to ``buffer_dtype``, shared ones once.

        Running statistics keep their dtype, see ``SyncBatchNorm``.
        """
        dtype = self.options.buffer_dtype or self.options.compute_dtype
        moved: dict[torch.Tensor, torch.Tensor] = {}
        for module in self.paths:
            for name, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                if buffer not in moved:
                    keeps = isinstance(module, SyncBatchNorm) or not buffer.is_floating_point()
                    cast = None if keeps else dtype
                    moved[buffer] = buffer.to(device=self.world.device, dtype=cast)
                if moved[buffer].dtype is not buffer.dtype:
                    for path in self.paths[module]:
                        self.unit.buffer_dtypes[dotted(path, name)] = buffer.dtype
                module._buffers[name] = moved[buffer]
