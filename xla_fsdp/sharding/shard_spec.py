"""How a sharded tensor relates to the full one: its shape, its layout, and the other ranks."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ..collectives.world import World
from .layout import LANES, Layout

# Positions from here on do not fit int32, which is faster than int64 on TPUs.
_INT32 = 1 << 31


class ShardedParameterError(RuntimeError):
    """Raised by an operation on a sharded parameter that needs more than one rank's shard."""


@dataclass(frozen=True)
class ShardSpec:
    """How a local part relates to the full tensor.

    Two tensors with equal specs have the same elements of tensors of the same shape, so elementwise
    operations on them need no communication.

    Attributes:
        layout: how the full tensor is cut; for a stack, the layout of one block.
        world: the ranks that share it.
        depth: for a stack of scanned blocks the number of blocks, else 0.
        flat: whether it is a vector of several parameters, ``flatten_parameters``.
        owner: provides the name; ignored when specs are compared.
    """

    layout: Layout
    world: World
    depth: int = 0
    flat: bool = False
    owner: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self

    def same(self, other: ShardSpec) -> bool:
        """Whether both specs describe the same elements."""
        return self is other or self == other

    @property
    def name(self) -> str:
        """The name of the parameter in its wrapper."""
        owner = None if self.owner is None else self.owner()
        return "of a model that no longer exists" if owner is None else str(owner.name)

    def own_share(self, power: torch.Tensor) -> torch.Tensor:
        """This rank's contribution to a sum over the ranks: all of its part."""
        return power

    @property
    def several(self) -> bool:
        """Whether the tensor contains more than one parameter."""
        return self.depth > 1 or len(self.layout.members) > 1

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        if self.flat:
            return torch.Size((self.layout.numel,))
        shape = self.layout.members[0].shape
        return torch.Size((self.depth, *shape) if self.depth else shape)

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's part."""
        shape = self.layout.shard_shape
        return torch.Size((self.depth, *shape) if self.depth else shape)

    @property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return self.layout.numel * max(self.depth, 1)

    @property
    def padded(self) -> bool:
        """Whether some rank has padding: elements that belong to no parameter."""
        return math.prod(self.layout.padded_shape) != self.layout.numel

    def inside(self, local: torch.Tensor) -> torch.Tensor:
        """A mask: for each element of ``local``, whether it belongs to the full tensor.

        Padding is at different positions on each rank. The rank is data, so that all ranks have the
        same program.
        """
        length, size = math.prod(self.layout.shard_shape), self.world.size
        dtype = torch.int32 if size * length < _INT32 else torch.int64
        position = torch.arange(length, dtype=dtype, device=local.device)
        if local.device == self.world.device:
            position = position + self.world.rank_on_device.to(dtype) * length
        else:
            position = position + self.world.rank * length
        inside = (position < self.layout.numel).view(self.layout.shard_shape)
        return inside.expand(self.local_shape) if self.depth else inside

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gathers the full tensor from ``local`` on all ranks, on this rank's device."""
        layout, size = self.layout, self.world.size
        if not layout.numel:
            return local.new_zeros(self.shape)
        rest = layout.shard_shape[1:]
        sent = local.reshape(-1, LANES) if layout.kind == "flat" else local.reshape(-1, *rest)
        full = self.world.all_gather(sent, self.name).reshape(size, max(self.depth, 1), -1, *rest)
        full = full.transpose(0, 1).reshape(max(self.depth, 1), *layout.padded_shape)
        return full[:, : self._length].reshape(self.shape)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``full``, on the device of ``full``."""
        layout, blocks = self.layout, max(self.depth, 1)
        if not layout.numel:
            return full.new_zeros(self.local_shape)
        shape = layout.members[0].shape[1:] if layout.kind == "dim0" else ()
        full = full.reshape(blocks, self._length, *shape)
        missing = layout.padded_shape[0] - self._length
        if missing:
            full = torch.cat([full, full.new_zeros(blocks, missing, *shape)], 1)
        shards = full.reshape(blocks, self.world.size, *layout.shard_shape)
        if full.device == self.world.device:
            own = torch.index_select(shards, 1, self.world.rank_on_device)
        else:
            own = shards[:, self.world.rank]
        return own.reshape(self.local_shape)

    @property
    def _length(self) -> int:
        """The length of a block's full tensor, without padding, in the first dimension."""
        return self.layout.members[0].shape[0] if self.layout.kind == "dim0" else self.layout.numel


def unsupported(operation: str, spec: ShardSpec, why: str = "") -> ShardedParameterError:
    """The error of ``operation``, which needs more than one rank's part of a parameter."""
    module = spec.name.rpartition(".")[0] or "the module"
    why = why or "this rank has only its shard"
    return ShardedParameterError(
        f"{operation} needs parameter {spec.name!r}, which is sharded here (or a value "
        f"computed from it, such as its gradient): {why}. The full shape is {list(spec.shape)}. In "
        f"a forward, call the wrapper that shards it (of {module!r}, or one around it), not a "
        "module inside; or exclude that module from the policy, so that the wrapper of the module "
        "that reads the parameter shards it (tied weights: assign one nn.Parameter to both modules "
        "before wrapping); for a method other than forward, call "
        "xla_fsdp.register_fsdp_forward_method(wrapper, 'method') once. Elsewhere, compute with "
        "parameter.full_tensor(), which all ranks must call, or within "
        "FSDP.summon_full_params(model). parameter.to_local() is this rank's shard. If an "
        "optimizer needs it, use one of xla_fsdp.optim, or wrap with sharding_strategy=NO_SHARD"
    )


# Set on a sharded tensor: its ShardSpec.
SPEC = "_xla_fsdp_spec"


def spec_of(value: Any) -> ShardSpec | None:
    """The spec of ``value``; ``None`` if it is not a sharded tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    found: ShardSpec | None = value.__dict__.get(SPEC)
    return found
