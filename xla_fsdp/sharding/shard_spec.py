"""What a sharded tensor is a part of: the full shape, the layout, the ranks with other parts."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ..collectives.world import World
from .layout import LANES, Layout

# Positions beyond do not fit int32, which TPUs are faster with.
_INT32 = 1 << 31


class ShardedParameterError(RuntimeError):
    """An operation on a sharded parameter that one rank's shard has no answer to."""


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor relates to the full one.

    Two tensors with equal specs hold the same elements of tensors of the same shape, so operations
    on single elements need nothing of other ranks.

    Attributes:
        layout: how the full tensor is cut; of a stack, that of one block.
        world: the ranks that share it.
        depth: of a stack of scanned blocks their number, else 0.
        flat: whether it is a vector of several parameters, ``flatten_parameters``.
        owner: knows the name; no part of what makes specs equal.
    """

    layout: Layout
    world: World
    depth: int = 0
    flat: bool = False
    owner: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self

    def same(self, other: ShardSpec) -> bool:
        """Whether both hold the same elements."""
        return self is other or self == other

    @property
    def name(self) -> str:
        """What the wrapper calls the parameter."""
        owner = None if self.owner is None else self.owner()
        return "of a model that is gone" if owner is None else str(owner.name)

    def own_share(self, power: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over the ranks: all that it has."""
        return power

    @property
    def several(self) -> bool:
        """Whether the tensor holds more than one parameter."""
        return self.depth > 1 or len(self.layout.members) > 1

    @property
    def shape(self) -> torch.Size:
        """Of the full tensor."""
        if self.flat:
            return torch.Size((self.layout.numel,))
        shape = self.layout.members[0].shape
        return torch.Size((self.depth, *shape) if self.depth else shape)

    @property
    def local_shape(self) -> torch.Size:
        """Of this rank's part."""
        shape = self.layout.shard_shape
        return torch.Size((self.depth, *shape) if self.depth else shape)

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return self.layout.numel * max(self.depth, 1)

    @property
    def padded(self) -> bool:
        """Whether some rank has elements that belong to no parameter."""
        return math.prod(self.layout.padded_shape) != self.layout.numel

    def inside(self, local: torch.Tensor) -> torch.Tensor:
        """Of each element of ``local``, whether it is one of the full tensor, and no padding.

        Padding is at other places on each rank. The rank is data, so that ranks share one program.
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
        """The full tensor, of ``local`` on all ranks, on this rank's device."""
        layout, size = self.layout, self.world.size
        if not layout.numel:
            return local.new_zeros(self.shape)
        rest = layout.shard_shape[1:]
        sent = local.reshape(-1, LANES) if layout.kind == "flat" else local.reshape(-1, *rest)
        full = self.world.all_gather(sent, self.name).reshape(size, max(self.depth, 1), -1, *rest)
        full = full.transpose(0, 1).reshape(max(self.depth, 1), *layout.padded_shape)
        return full[:, : self._length].reshape(self.shape)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``full``, where that is."""
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
        """Of a block's full tensor without padding, in the first dimension of the padded shape."""
        return self.layout.members[0].shape[0] if self.layout.kind == "dim0" else self.layout.numel


def unsupported(operation: str, spec: ShardSpec, why: str = "") -> ShardedParameterError:
    """The error of ``operation``, which one rank's part of a parameter has no answer to."""
    module = spec.name.rpartition(".")[0] or "the module"
    why = why or "this rank has only its part of the elements"
    return ShardedParameterError(
        f"{operation} needs parameter {spec.name!r}, which is sharded here (or is about a value "
        f"made of it, such as its gradient): {why}. The full shape is {list(spec.shape)}. In a "
        f"forward, call the wrapper that holds it ({module!r}, or one around it), not a module "
        "inside, or leave it out of the policy, so that the wrapper of the module that reads it "
        "holds it (tied weights: assign one nn.Parameter to both modules before wrapping); for "
        "another method than forward, call "
        "xla_fsdp.register_fsdp_forward_method(wrapper, 'method') once. Elsewhere, compute with "
        "parameter.full_tensor(), which all ranks must call, or within "
        "FSDP.summon_full_params(model). parameter.to_local() is this rank's part. An optimizer "
        "that needs it: those of xla_fsdp.optim, or wrap with sharding_strategy=NO_SHARD"
    )


# On a sharded tensor: its ShardSpec.
SPEC = "_xla_fsdp_spec"


def spec_of(value: Any) -> ShardSpec | None:
    """What ``value`` is a part of; ``None`` if it is no sharded tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    found: ShardSpec | None = value.__dict__.get(SPEC)
    return found
