"""The nouns of sharding: a stored tensor, and a module attribute that uses part of it."""

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
    from ..offload.copies import ShardCopy
    from .comms import Communicator


@dataclass(eq=False)
class ShardedTensor:
    """One stored tensor: this rank's shard, and how it relates to the parameters in it.

    Usually one parameter; several with ``flatten_parameters``. A parameter that other units use as
    well (tied weights) is the same object in all of them.
    """

    shard: nn.Parameter
    layout: Layout
    key: str  # name in the wrapper that sharded it
    flattened: bool = False  # registered on the wrapper, not where its members are
    wide: bool = False  # computed with as it is stored, whatever compute_dtype says
    # Who has the other shards; None for what only a trace knows. Optimizers find it here.
    world: World | None = None
    summoned: object | None = None  # its full parameters outside of a forward, see summon.py
    unreduced: int = 0  # units that hold full gradients of it, inside no_sync
    copy: ShardCopy | None = None  # where the shard is on the host, see cpu_offload.py
    widens: bool = False  # a gradient stays as it is reduced: who gets it gives it the right dtype
    reordered: bool = False  # its values came from files that list parameters in another order
    # Of a flat vector: by member, the attributes that users set on the parameter.
    attributes: Sequence[dict[str, Any]] = ()
    comms: Communicator | None = None  # of the unit that sharded it, whose name it knows

    @property
    def name(self) -> str:
        """The dotted name, from the root if that is known."""
        return self.key if self.comms is None else self.comms.label + self.key

    @property
    def divided(self) -> bool:
        """Whether other ranks have other shards of it."""
        return self.world is not None and self.world.size > 1

    def attributes_of(self, member: int) -> dict[str, Any]:
        """Where attributes of full parameter ``member`` are: those of users, and others that
        :func:`is_users` tells apart."""
        return self.attributes[member] if self.flattened else vars(self.shard)

    @property
    def spec(self) -> TensorSpec:
        """What a communication plan needs to know of it."""
        return TensorSpec(self.key, self.layout, self.shard.dtype, self.wide)

    @property
    def source(self) -> torch.Tensor:
        """What this rank sends in a gather, a plain tensor."""
        return local(self.shard) if self.copy is None else self.copy.value

    def shard_spec(self) -> ShardSpec | None:
        """What the shard is a part of."""
        if self.world is None:
            return None
        shape = local(self.shard).shape
        depth = 0 if tuple(shape) == self.layout.shard_shape else shape[0]
        return ShardSpec(self.layout, self.world, depth, self.flattened, weakref.ref(self))


@dataclass(eq=False)
class Place:
    """A module attribute that must hold full parameter ``index`` while the unit computes."""

    module: nn.Module
    name: str
    index: int
    resting: nn.Parameter | None  # what it holds otherwise: the shard, or None if flattened
    block: str = ""  # the number of the scanned block, whose module stands for all
    shown: FlattenedParameter | None = None  # an attribute of the module, where it holds None

    def put(self, full: Any) -> None:
        """Has the module hold ``full``, the full parameter."""
        vars(self.module).pop(self.name, None)
        self.module._parameters[self.name] = full

    def rest(self) -> None:
        """Has the module hold what it holds otherwise."""
        self.module._parameters[self.name] = self.resting
        if self.shown is not None:
            vars(self.module)[self.name] = self.shown


# On a shard: the ShardedTensor it belongs to. On a parameter that has been sharded, but that other
# modules may still hold (tied weights): the ShardedTensor and the parameter's number in it.
_HOME = "_xla_fsdp_home"


def set_home(parameter: nn.Parameter, tensor: ShardedTensor, number: int = 0) -> None:
    """Notes on ``parameter`` that its values are those of member ``number`` of ``tensor``."""
    setattr(parameter, _HOME, (tensor, number))


def set_home_of_shards(tensors: Iterable[ShardedTensor]) -> None:
    """Notes on the shards of ``tensors`` whose they are, and gives them their type.

    Lifetime: the wrapper owns ``tensors``, these own the shards, which know them only weakly: what
    a model holds on the device goes with the model, without waiting for the garbage collector.
    """
    for tensor in tensors:
        setattr(tensor.shard, _HOME, (weakref.ref(tensor), 0))
        spec = tensor.shard_spec()
        if spec is not None:
            make_sharded(tensor.shard, spec)


def home_of(parameter: object) -> ShardedTensor | None:
    """Where the values of ``parameter`` are, if it is a shard or has been sharded.

    Raises:
        RuntimeError: it is a shard of a wrapper that is gone.
    """
    home, _ = getattr(parameter, _HOME, (None, 0))
    if not isinstance(home, weakref.ref):
        return home
    tensor = home()
    if tensor is None:
        shape = list(parameter.shape)  # type: ignore[attr-defined]
        raise RuntimeError(
            f"a parameter of shape {shape} is the shard of a wrapper that nothing refers to any "
            "more, so what it is a part of is not known: keep the model as long as its parameters"
        )
    return tensor


def homes_of(parameters: Iterable[object]) -> Iterator[ShardedTensor]:
    """:func:`home_of` of those that have one."""
    return filter(None, map(home_of, parameters))


def number_at_home(parameter: nn.Parameter) -> int:
    """Which member of its :func:`home_of` a parameter is."""
    return getattr(parameter, _HOME)[1]


def require_reduced(parameters: Iterable[object], what: str) -> None:
    """Raises RuntimeError if ``no_sync`` holds gradients of one of ``parameters``, of which
    ``what`` would know nothing."""
    for parameter in parameters:
        home = home_of(parameter)
        if home is not None and home.unreduced:
            raise RuntimeError(
                f"{what} while gradients of {home.key!r} are held by no_sync and not reduced yet, "
                "so they would be missing: run the last backward before it outside of no_sync(), "
                "or drop them with model.zero_grad()"
            )
