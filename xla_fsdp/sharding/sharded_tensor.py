"""The data classes of sharding: a stored tensor, and a module attribute that uses part of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..collectives.world import World
from .attributes import FlattenedParameter
from .layout import Layout, TensorSpec
from .shard_spec import ShardSpec
from .sharded_parameter import local, make_sharded

if TYPE_CHECKING:
    from ..offload import ShardCopy
    from .comms import Communicator


@dataclass(eq=False)
class ShardedTensor:
    """One stored tensor: this rank's shard, and how it relates to the parameters in it.

    Usually it contains one parameter; with ``flatten_parameters`` several. A parameter that other
    units also use (tied weights) is the same object in all of them.
    """

    shard: nn.Parameter
    layout: Layout
    key: str  # name in the wrapper that sharded it
    flattened: bool = False  # registered on the wrapper, not on the modules of its members
    wide: bool = False  # computed in the dtype of the shard, whatever compute_dtype is
    # The ranks with the other shards; None inside a trace. Optimizers find it here.
    world: World | None = None
    summoned: object | None = None  # its full parameters outside of a forward, see summon.py
    unreduced: int = 0  # number of units that store full gradients of it, inside no_sync
    copy: ShardCopy | None = None  # the device copy of a shard on the host, see cpu_offload.py
    widens: bool = False  # a gradient keeps the dtype of the reduction; its receiver casts it
    reordered: bool = False  # its values came from files that list parameters in another order
    # For a flat vector: by member, the attributes that users set on the parameter.
    attributes: Sequence[dict[str, Any]] = ()
    comms: Communicator | None = None  # of the unit that sharded it; has the unit's name

    @property
    def name(self) -> str:
        """The dotted name, from the root module if that is known."""
        return self.key if self.comms is None else self.comms.label + self.key

    @property
    def divided(self) -> bool:
        """Whether other ranks have other shards of it."""
        return self.world is not None and self.world.size > 1

    def attributes_of(self, member: int) -> dict[str, Any]:
        """The dict that contains the attributes of full parameter ``member``: those that users set,
        and others (:func:`is_user_attribute` distinguishes them)."""
        return self.attributes[member] if self.flattened else vars(self.shard)

    @property
    def spec(self) -> TensorSpec:
        """The properties that a communication plan needs."""
        return TensorSpec(self.key, self.layout, self.shard.dtype, self.wide)

    @property
    def source(self) -> torch.Tensor:
        """What this rank sends in a gather, a plain tensor."""
        return local(self.shard) if self.copy is None else self.copy.send()

    def shard_spec(self) -> ShardSpec | None:
        """The spec of the shard."""
        if self.world is None:
            return None
        shape = local(self.shard).shape
        depth = 0 if tuple(shape) == self.layout.shard_shape else shape[0]
        return ShardSpec(self.layout, self.world, depth, self.flattened, weakref.ref(self))


@dataclass(eq=False)
class ParameterSlot:
    """A module attribute that must be full parameter ``index`` while the unit computes."""

    module: nn.Module
    name: str
    index: int
    sharded_value: nn.Parameter | None  # its value otherwise: the shard, or None if flattened
    block: str = ""  # for scanned blocks: the number of the block; one module represents all
    shown: FlattenedParameter | None = None  # a placeholder attribute, if `sharded_value` is None

    def put(self, full: Any) -> None:
        """Sets the attribute to ``full``, the full parameter."""
        vars(self.module).pop(self.name, None)
        self.module._parameters[self.name] = full

    def restore_sharded(self) -> None:
        """Sets the attribute back to its value outside of computations."""
        self.module._parameters[self.name] = self.sharded_value
        if self.shown is not None:
            vars(self.module)[self.name] = self.shown


# Set on a shard: the ShardedTensor it belongs to. Set on a parameter that has been sharded (other
# modules may still refer to it, tied weights): the ShardedTensor and the parameter's number in it.
_SHARDED_TENSOR = "_xla_fsdp_sharded_tensor"


def set_sharded_tensor(parameter: nn.Parameter, tensor: ShardedTensor, number: int = 0) -> None:
    """Marks ``parameter``: its values are those of member ``number`` of ``tensor``."""
    setattr(parameter, _SHARDED_TENSOR, (tensor, number))


def mark_shards(tensors: Iterable[ShardedTensor]) -> None:
    """Marks the shards of ``tensors`` with their tensor, and gives them their type.

    Lifetime: the wrapper refers to ``tensors``, these to the shards, and shards only weakly back.
    So device memory is freed together with the model, without the garbage collector.
    """
    for tensor in tensors:
        setattr(tensor.shard, _SHARDED_TENSOR, (weakref.ref(tensor), 0))
        spec = tensor.shard_spec()
        if spec is not None:
            make_sharded(tensor.shard, spec)


def sharded_tensor_of(parameter: object) -> ShardedTensor | None:
    """The sharded tensor with the values of ``parameter``, a shard or a parameter that was sharded;
    ``None`` for other objects.

    Raises:
        RuntimeError: it is a shard of a wrapper that no longer exists.
    """
    sharded, _ = getattr(parameter, _SHARDED_TENSOR, (None, 0))
    if not isinstance(sharded, weakref.ref):
        return sharded
    tensor = sharded()
    if tensor is None:
        shape = list(parameter.shape)  # type: ignore[attr-defined]
        raise RuntimeError(
            f"a parameter of shape {shape} is the shard of a wrapper that no longer exists, so its "
            "full parameter is not known. Keep a reference to the model while you use its "
            "parameters"
        )
    return tensor


def sharded_tensors_of(parameters: Iterable[object]) -> Iterator[ShardedTensor]:
    """:func:`sharded_tensor_of` of those ``parameters`` that have one."""
    return filter(None, map(sharded_tensor_of, parameters))


def member_number_of(parameter: nn.Parameter) -> int:
    """The number of the member of its :func:`sharded_tensor_of` that ``parameter`` is."""
    return getattr(parameter, _SHARDED_TENSOR)[1]


def require_reduced(parameters: Iterable[object], what: str) -> None:
    """Raises RuntimeError if ``no_sync`` stores gradients of one of ``parameters``, which ``what``
    would ignore."""
    for parameter in parameters:
        sharded = sharded_tensor_of(parameter)
        if sharded is not None and sharded.unreduced:
            raise RuntimeError(
                f"{what} was called while gradients of {sharded.key!r} are stored by no_sync and "
                "not reduced yet, so they would be ignored. Run the last backward before it "
                "outside of no_sync(), or drop them with model.zero_grad()"
            )
