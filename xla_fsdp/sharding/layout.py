"""Cuts parameters into shards and puts them together again, in plain torch.

``flat``: the elements in order, zero-padded to a multiple of ``size * 128``, sent as rows of the
matrix if these fill TPU vector registers, so that a gathered matrix needs no copy, else as
``(n, 128)``: for a vector the compiler would make an all-reduce. ``dim0``: rows, zero-padded to a
multiple of ``size``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..collectives.world import World
from ..tpu.chips import LANES, SUBLANES


@dataclass(frozen=True)
class Member:
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """How a stored tensor, one parameter or several, is split over ``size`` ranks.

    ``kind``: ``"flat"`` or ``"dim0"``.
    """

    kind: str
    members: tuple[Member, ...]
    size: int

    @classmethod
    def flat(cls, shapes: Sequence[torch.Size], size: int) -> Layout:
        members: list[Member] = []
        offset = 0
        for shape in shapes:
            members.append(Member(tuple(shape), offset))
            offset += members[-1].numel
        return cls("flat", tuple(members), size)

    @classmethod
    def rows(cls, shape: torch.Size, size: int) -> Layout:
        return cls("dim0", (Member(tuple(shape), 0),), size)

    @cached_property
    def numel(self) -> int:
        """Without padding."""
        return self.members[-1].offset + self.members[-1].numel

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Of the shards of all ranks put together."""
        if self.kind == "dim0":
            rows, *rest = self.members[0].shape
            return (math.ceil(rows / self.size) * self.size, *rest)
        return (math.ceil(self.numel / (self.size * LANES)) * self.size * LANES,)

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        first, *rest = self.padded_shape
        return (first // self.size, *rest)

    @cached_property
    def comm_shape(self) -> tuple[int, ...]:
        """The shape in which a shard is gathered and a gradient shard arrives."""
        if self.kind == "dim0":
            return self.shard_shape
        if len(self.members) == 1 and len(self.members[0].shape) == 2:
            rows, columns = self.members[0].shape
            filled = rows and columns and columns % LANES == 0
            if filled and rows % (self.size * SUBLANES) == 0:
                return (rows // self.size, columns)
        return (self.shard_shape[0] // LANES, LANES)

    def cut(self, values: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """A rank's shard of the full ``values``, one a member; never joins all of them."""
        if self.kind == "dim0":
            rows = self.shard_shape[0]
            kept = values[0][rank * rows : (rank + 1) * rows]
            missing = rows - kept.shape[0]
            return torch.cat([kept, kept.new_zeros(missing, *kept.shape[1:])])
        (length,) = self.shard_shape
        pieces, filled = [], 0
        for value, (begin, end, _) in zip(values, self.pieces(rank), strict=True):
            if begin < end:
                pieces.append(value.reshape(-1)[begin:end])
                filled += end - begin
        return torch.cat([*pieces, values[0].new_zeros(length - filled)])

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """Each member's part in a rank's shard: ``(begin, end, at)``, ``(0, 0, 0)`` if none.

        Elements ``begin .. end`` of the flattened member are at ``at`` in the flattened shard.
        """
        length = math.prod(self.shard_shape)
        first = rank * length
        held = []
        for member in self.members:
            begin = max(first - member.offset, 0)
            end = min(first + length - member.offset, member.numel)
            held.append((begin, end, member.offset + begin - first) if begin < end else (0, 0, 0))
        return held

    def split(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """The full values of the members, from the shards of all ranks in ``comm_shape``.

        No views: freeing one must free its memory even while another lives.
        """
        if self.kind == "dim0":
            (member,) = self.members
            if gathered.shape[0] == member.shape[0]:
                return [torch.view_copy(gathered, member.shape)]
            return [torch.slice_copy(gathered, 0, 0, member.shape[0])]
        if len(self.members) == 1 and self.numel == gathered.numel():
            return [torch.view_copy(gathered, self.members[0].shape)]
        whole = gathered.view(-1)
        full = []
        for member in self.members:
            piece = whole
            if member.numel != whole.numel():
                piece = torch.slice_copy(whole, 0, member.offset, member.offset + member.numel)
            full.append(torch.view_copy(piece, member.shape))
        return full

    def join(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Full gradients, one a member, as ``(size * comm_shape[0], ...)`` for the reduce-scatter.

        ``None`` stands for zero; at least one must be given. The padding is zero.
        """
        like = next(grad for grad in grads if grad is not None)
        if self.kind == "dim0":
            missing = self.padded_shape[0] - like.shape[0]
            return torch.cat([like, like.new_zeros(missing, *like.shape[1:])]) if missing else like
        if len(self.members) == 1 and self.numel == self.padded_shape[0]:
            return like.reshape(-1, self.comm_shape[1])
        pieces = [
            grad.reshape(-1) if grad is not None else like.new_zeros(member.numel)
            for member, grad in zip(self.members, grads, strict=True)
        ]
        missing = self.padded_shape[0] - self.numel
        if missing:
            pieces.append(like.new_zeros(missing))
        return torch.cat(pieces).view(-1, LANES)


@dataclass(frozen=True)
class TensorSpec:
    """What the communication plan needs of a sharded tensor.

    ``wide``: computed in the dtype of the shard, whatever ``compute_dtype`` is.
    """

    key: str
    layout: Layout
    dtype: torch.dtype
    wide: bool = False

    def compute_dtype(self, asked: torch.dtype | None) -> torch.dtype:
        return computed_in(self.dtype, None if self.wide else asked)


def computed_in(stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter in ``stored`` computes if ``compute_dtype`` is ``asked``."""
    return asked if asked is not None and stored.is_floating_point else stored


def count_up(length: int, limit: int, device: torch.device) -> torch.Tensor:
    """0 to ``length`` - 1, int32 if ``limit`` permits; int64 is slower on TPUs."""
    return torch.arange(
        length, dtype=torch.int32 if limit < 1 << 31 else torch.int64, device=device
    )


class ShardedParameterError(RuntimeError):
    """Raised by an operation on a sharded parameter that needs more than one rank's shard."""


@dataclass(frozen=True)
class ShardSpec:
    """How a local part relates to the full tensor; equal specs need no communication.

    Attributes:
        layout: how the full tensor is cut; for a stack, the layout of one block.
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

    @property
    def name(self) -> str:
        tensor = self.tensor
        return "of a model that no longer exists" if tensor is None else str(tensor.name)

    @property
    def tensor(self) -> Any | None:
        """The ``ShardedTensor`` that it describes; ``None`` if that no longer exists."""
        return None if self.owner is None else self.owner()

    @property
    def blocks(self) -> int:
        return max(self.depth, 1)

    @property
    def several(self) -> bool:
        """Whether it contains more than one parameter."""
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
        """Of the full tensor."""
        return self.layout.numel * self.blocks

    @property
    def padded(self) -> bool:
        """Whether some rank has padding."""
        return math.prod(self.layout.padded_shape) != self.layout.numel

    def positions(self, local: torch.Tensor) -> torch.Tensor:
        """Where the elements of ``local`` (of one block) are in the flattened full tensor with its
        padding, a vector; one program for all ranks."""
        length = math.prod(self.layout.shard_shape)
        here = count_up(length, self.world.size * length, local.device)
        if local.device == self.world.device:
            return here + self.world.rank_on_device.to(here.dtype) * length
        return here + self.world.rank * length

    def inside(self, local: torch.Tensor) -> torch.Tensor:
        """A mask of the elements of ``local`` that are no padding; one program for all ranks."""
        inside = (self.positions(local) < self.layout.numel).view(self.layout.shard_shape)
        return inside.expand(self.local_shape) if self.depth else inside

    def gather(self, local: torch.Tensor, label: str = "") -> torch.Tensor:
        """The full tensor, on this rank's device; collective. ``label``: default its name."""
        layout, size = self.layout, self.world.size
        if not layout.numel:
            return local.new_zeros(self.shape)
        rest = layout.shard_shape[1:]
        sent = local.reshape(-1, LANES) if layout.kind == "flat" else local.reshape(-1, *rest)
        full = self.world.all_gather(sent, label or self.name)
        full = full.reshape(size, self.blocks, -1, *rest)
        full = full.transpose(0, 1).reshape(self.blocks, *layout.padded_shape)
        return full[:, : self._length].reshape(self.shape)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``full``, on its device."""
        layout, blocks = self.layout, self.blocks
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
        """Of a block's full tensor in the first dimension."""
        return self.layout.members[0].shape[0] if self.layout.kind == "dim0" else self.layout.numel


def unsupported(operation: str, spec: ShardSpec, why: str = "") -> ShardedParameterError:
    named = f"parameter {spec.name!r}" if spec.tensor is not None else f"a parameter {spec.name}"
    inner = spec.name.rpartition(".")[0]
    module = repr(inner) if inner else "its module"
    why = why or "this rank has only its shard"
    return ShardedParameterError(
        f"{operation} needs {named}, which is sharded here (or a value "
        f"computed from it, such as its gradient): {why}. The full shape is {list(spec.shape)}. In "
        f"a forward, call the wrapper that shards it (of {module}, or one around it), not a "
        "module inside; or wrap the module inside too, and call it; or exclude that module from "
        "the policy, so that the wrapper of the module that reads the parameter shards it (tied "
        "weights: assign one nn.Parameter to both modules before wrapping); for a method other "
        "than forward, call xla_fsdp.register_fsdp_forward_method(wrapper, 'method') once. "
        "Elsewhere, compute with "
        "parameter.full_tensor(), which all ranks must call, or within "
        "FSDP.summon_full_params(model). parameter.to_local() is this rank's shard. If an "
        "optimizer needs it, use one of xla_fsdp.optim, or wrap with sharding_strategy=NO_SHARD"
    )


SPEC = "_xla_fsdp_spec"


def spec_of(value: Any) -> ShardSpec | None:
    """The spec of ``value``; ``None`` if it is not sharded."""
    if not isinstance(value, torch.Tensor):
        return None
    found: ShardSpec | None = value.__dict__.get(SPEC)
    return found
