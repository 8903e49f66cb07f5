"""Turns equal blocks into one template module and stacked shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..collectives.host_data import LARGE, fake_cpu_tensor
from ..collectives.world import World, broadcast_from_first
from ..layers.saved_activations import ATTENTION
from ..names import dotted, is_wrapper
from ..ranks.rank import is_simulated_rank
from ..sharding.building import keeps_buffer_dtypes, own_shard
from ..sharding.cpu_offload import HostShard, on_host
from ..sharding.deferred_values import Key, UninitializedTensor, is_deferred, materialize
from ..sharding.freeing import release_original_
from ..sharding.layout import Layout
from ..sharding.mixed_precision import compute_in_float32, full_precision_modules
from ..sharding.options import FSDPOptions
from ..sharding.sharded_tensor import mark_released, sharded_tensor_of
from ..sharding.user_checks import require_shardable_parameters
from .equality import describe, require_same, require_same_attributes
from .unit import ParameterStack, ScanUnit, Stack


class ScanBuilder:
    """Takes blocks one at a time, so that only one full block must exist."""

    def __init__(self, options: FSDPOptions, world: World):
        self.options = options
        self.world = world
        self.ignore = frozenset(options.ignore)
        self.on_device = False  # whether a block was on the XLA device
        self._template: nn.Module | None = None
        self._described: dict = {}
        self._stacks: dict[str, Stack] = {}
        self._pieces: dict[str, list[torch.Tensor]] = {}  # by block
        self._attributes: dict[str, dict] = {}  # that users set on the first block's parameters
        self._cast: dict[str, torch.dtype] = {}
        self._late: dict[str, dict[Key, str]] = {}  # by stack, what has no values
        self._wide: set[nn.Module] = set()  # of the template, whose tensors are not cast
        # Objects met so far, which stay alive so that identities stay unique.
        self._seen: dict[nn.Parameter, int] = {}

    def build(self, blocks: Iterable[nn.Module]) -> ScanUnit:
        """Raises ValueError, TypeError as :func:`xla_fsdp.scan_blocks` says."""
        checked: Iterable[nn.Module] = (
            self._checked(block, number) for number, block in enumerate(blocks)
        )
        if not isinstance(blocks, Iterator):
            checked = list(checked)  # check all first: if one raises, no block has been changed
        depth = 0
        for block in checked:
            self._take(block, depth)
            depth += 1
        if self._template is None:
            raise ValueError("scan_blocks needs at least one block, got none. Pass the blocks")
        unit = ScanUnit(self.options, self.world, self._template)
        for name, stack in self._stacks.items():
            if isinstance(stack, ParameterStack):
                self._stack_shards(stack, self._pieces.pop(name), self._template)
                unit.parameters.append(stack)
            else:
                self._stack_buffer(stack, self._pieces.pop(name))
                unit.buffers.append(stack)
        for name, keys in self._late.items():
            stack = self._stacks[name]
            use = None if isinstance(stack, ParameterStack) else stack.uses[0]
            unit.uninitialized.append(UninitializedTensor(stack.value, keys, use))
        compute_in_float32(self.options.mixed_precision, list(self._template.modules()))
        unit.describe_blocks(depth, self._cast)
        unit.mark_shards()
        return unit

    def _checked(self, block: nn.Module, number: int) -> nn.Module:
        """Returns ``block`` if it can be scanned together with the blocks before it."""
        self._require_block(block, number)
        for name, parameter in block.named_parameters():
            if sharded_tensor_of(parameter) is not None:
                raise ValueError(
                    f"block {number} shares the parameter {name} with a wrapped module, which "
                    "scanned blocks do not support. Untie it, or wrap each block separately"
                )
            other = self._seen.setdefault(parameter, number)
            if other != number:
                raise ValueError(
                    f"blocks {other} and {number} share the parameter {name}, which scanned blocks "
                    "do not support. Wrap each block separately"
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
        for _ in materialize(block, lambda module: False, self.options.param_init_fn):
            pass
        assert self._template is not None  # at least one block has been checked
        require_same_attributes(self._template, block, number, self.ignore)
        if block is self._template:
            self._find_stacks(block)
        for name, stack in self._stacks.items():
            if isinstance(stack, ParameterStack):
                own = block.get_parameter(name)
                self._note_uninitialized(own, name, number * stack.numel)
                self._pieces[name].append(self._cut(own, stack.layout))
            else:
                self._note_uninitialized(block.get_buffer(name), name, number)
                self._pieces[name].append(block.get_buffer(name))

    def _note_uninitialized(self, tensor: torch.Tensor, name: str, first: int) -> None:
        """Records that ``tensor``, at offset ``first`` in its stack, gets values by a load."""
        if is_deferred(tensor):
            block = len(self._late.setdefault(name, {}))
            self._late[name][first, 0] = dotted(str(block), name)

    @staticmethod
    def _require_block(block: nn.Module, number: int) -> None:
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

    def _find_stacks(self, block: nn.Module) -> None:
        uses: dict[torch.Tensor, dict[tuple[nn.Module, str], None]] = {}
        names: dict[torch.Tensor, list[str]] = {}
        for path, module in block.named_modules(remove_duplicate=False):
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    uses.setdefault(tensor, {})[module, name] = None
                    names.setdefault(tensor, []).append(dotted(path, name))
        self._wide = full_precision_modules(self.options.mixed_precision, list(block.modules()))
        for tensor, known in names.items():
            stack = Stack(known, list(uses[tensor]))
            if isinstance(tensor, nn.Parameter):
                wide = stack.uses[0][0] in self._wide
                stack = ParameterStack(known, stack.uses, layout=self._layout(tensor), wide=wide)
                self._attributes[stack.name] = dict(tensor.__dict__)
            self._stacks[stack.name] = stack
            self._pieces[stack.name] = []

    def _layout(self, parameter: nn.Parameter) -> Layout:
        if self.options.shard_param_on_dim_0 and parameter.dim() > 0:
            return Layout.rows(parameter.shape, self.world.size)
        return Layout.flat([parameter.shape], self.world.size)

    def _cut(self, parameter: nn.Parameter, layout: Layout) -> torch.Tensor:
        with torch.no_grad():
            value = parameter.detach()
            if self.options.sync_module_states:
                value = broadcast_from_first(self.world, value)
            shard = own_shard(layout, [value], self.world)
        release_original_(parameter)
        mark_released(parameter)
        return shard

    def _stack_shards(
        self, stack: ParameterStack, shards: list[torch.Tensor], template: nn.Module
    ) -> None:
        trainable = template.get_parameter(stack.name).requires_grad
        with torch.no_grad():
            values = _stacked(shards)
            if self.options.cpu_offload is None:
                parameter = nn.Parameter(values.to(self.world.device), requires_grad=trainable)
            else:
                parameter = HostShard(on_host(values), requires_grad=trainable)
        parameter.__dict__.update(self._attributes[stack.name])
        stack.put(parameter)

    def _stack_buffer(self, stack: Stack, buffers: list[torch.Tensor]) -> None:
        first = buffers[0]
        if self.options.sync_module_states:
            agreed = {id(buffer): broadcast_from_first(self.world, buffer) for buffer in buffers}
            buffers = [agreed[id(buffer)] for buffer in buffers]
            first = buffers[0]
        dtype = self.options.dtype_of_buffers
        keeps = any(keeps_buffer_dtypes(m) or m in self._wide for m, _ in stack.uses)
        if dtype is None or keeps or not first.is_floating_point():
            dtype = first.dtype
        if dtype is not first.dtype:
            self._cast[stack.name] = first.dtype
        stack.shared = len(buffers) > 1 and all(buffer is first for buffer in buffers)
        value = first if stack.shared else torch.stack(buffers)
        stack.put(value.to(device=self.world.device, dtype=dtype))


def _stacked(shards: list[torch.Tensor]) -> torch.Tensor:
    """``torch.stack``; in a plan, without values if the result is large."""
    first = shards[0]
    if is_simulated_rank() and len(shards) * first.numel() >= LARGE:
        return fake_cpu_tensor((len(shards), *first.shape), first.dtype)
    return torch.stack(shards)
