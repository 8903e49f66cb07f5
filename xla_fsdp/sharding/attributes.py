"""What ``module.weight`` gives while that parameter is sharded.

The shard, whose type knows what it is. But in a forward, and in a backward, code that reads it (a
head that is tied by reading ``self.embed.weight``, ``nn.MultiheadAttention`` reading the weight of
its ``out_proj``) means to compute with the full parameter, also with single elements.
There it gets a stand-in, which has the full parameter's shape, dtype and device and no value, and
which says what is wrong when something is computed with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from .comms import Communicator
from .gathering import computing_passes, expects_full_parameters
from .sharded_parameter import local
from .sharded_tensor import Place, ShardedTensor
from .unsharded import UnshardedParameter


class Whole(NamedTuple):
    """A parameter that a module has in full only now and then, and what is there in between."""

    resting: nn.Parameter | None
    owner: Communicator
    own_name: str  # in the wrapped module
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """The dotted name, from the root if that is known."""
        return self.owner.label + self.own_name


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """``_parameters`` of a module, some of which are shards.

    Who goes through all of them in a forward (``sum(p.norm() for p in self.parameters())``) gets
    stand-ins, as long as gradients are on: what follows is a part of the loss. Without (a moving
    average of another model's weights) it may be one element at a time, and shards are what it is
    about.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.wholes: dict[str, Whole] = {}
        # By name; a forward may go through them in every step.
        self._stand_ins: dict[str, ShardedElsewhere] = {}

    def items(self) -> Any:
        if not (torch.is_grad_enabled() and computing_passes()):
            return super().items()
        return [(name, self._seen(name, value)) for name, value in super().items()]

    def values(self) -> Any:
        return [value for _, value in self.items()]

    def _seen(self, name: str, value: Any) -> Any:
        whole = self.wholes.get(name)
        if whole is None or value is None or value is not whole.resting:
            return value
        known = self._stand_ins.get(name)
        if known is None or known.resting is not value or known.dtype is not value.dtype:
            known = self._stand_ins[name] = ShardedElsewhere(whole)
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stand_ins": {}}  # have no value that could be copied


class ModuleParameters(WatchedParameters):
    """``_parameters`` of a module some of whose parameters a unit shards."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        # References to the wrappers of the units that shard them, see around.py.
        self.holders: list[Any] = []

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, UnshardedParameter):  # as all that a forward reads of its own
            return value
        whole = self.wholes.get(name)
        if whole is not None and value is whole.resting:
            # A hook in the backward, too, has a use for all of it only. Of a flattened vector
            # nothing else is here.
            in_backward = torch._C._current_graph_task_id() != -1
            if whole.resting is None or expects_full_parameters() or in_backward:
                return ShardedElsewhere(whole)
        return value

    @property
    def flattened(self) -> bool:
        """Whether parameters are on a wrapper, so that nothing is here."""
        return any(whole.resting is None for whole in self.wholes.values())


def watch_place(
    place: Place, tensor: ShardedTensor, member: int, owner: Communicator, name: str
) -> None:
    """Has the module of ``place`` give stand-ins where full parameters are expected.

    ``place`` is for parameter ``member`` of ``tensor``, called ``name`` in the module that
    ``owner`` labels.
    """
    module, shard = place.module, tensor.shard
    parameters = module._parameters
    if not isinstance(parameters, ModuleParameters):
        parameters = module.__dict__["_parameters"] = ModuleParameters(parameters)
    shape = tensor.layout.members[member].shape
    parameters.wholes[place.name] = Whole(
        place.resting, owner, name, shape, shard.dtype, owner.world.device
    )


def watch_flattened(
    module: nn.Module, name: str, shard: nn.Parameter, owner: Communicator, device: torch.device
) -> None:
    """Has ``module``, a wrapper, which has vector ``name``, give a stand-in for it to those who go
    through all parameters in a forward."""
    parameters = module._parameters
    if not isinstance(parameters, WatchedParameters):
        parameters = module.__dict__["_parameters"] = WatchedParameters(parameters)
    whole = Whole(shard, owner, name, tuple(local(shard).shape), shard.dtype, device)
    parameters.wholes[name] = whole


def shard_of(parameter: Any) -> Any:
    """The shard that ``parameter`` stands for, or itself."""
    return parameter.resting if type(parameter) is ShardedElsewhere else parameter


class ShardedElsewhere(torch.Tensor):
    """A parameter without a value, of which this rank has only a shard.

    What concerns the shard (its gradient, hooks, whether it is trained) is asked of that.

    Raises:
        RuntimeError: by every operation on its value; it names the parameter and the remedies.
    """

    _name: str
    _is_param: bool
    resting: nn.Parameter | None

    @staticmethod
    def __new__(cls, whole: Whole) -> ShardedElsewhere:
        like = whole.resting
        stand_in = torch.Tensor._make_wrapper_subclass(
            cls,
            whole.shape,
            dtype=whole.dtype if like is None else like.dtype,
            device=whole.device,
            requires_grad=like is None or like.requires_grad,
        )
        stand_in._is_param = True  # isinstance(..., nn.Parameter)
        stand_in._name = whole.name
        stand_in.resting = like
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        own = args[0] if args and type(args[0]) is cls else None
        if own is not None and func in _OF_THE_VALUE:
            refuse(own._name, ".data")
        if own is None or own.resting is None or func not in _OF_THE_SHARD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func.__name__.startswith("register_"):  # a shard has its own
            return getattr(own.resting, func.__name__)(*args[1:], **(kwargs or {}))
        found = func(own.resting, *args[1:], **(kwargs or {}))
        return own if found is own.resting else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is not a classmethod's
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> NoReturn:
        every = [*args, *(kwargs or {}).values()]
        flat = [x for one in every for x in (one if isinstance(one, (list, tuple)) else [one])]
        name = next((one._name for one in flat if isinstance(one, cls)), "")
        refuse(name, f"{func}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedElsewhere({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _accessors(*names: str) -> Iterator[Any]:
    for name in names:
        attribute = getattr(torch.Tensor, name)
        yield from (attribute.__get__, attribute.__set__, attribute.__delete__)


_OF_THE_VALUE = frozenset(_accessors("data"))
_OF_THE_SHARD = frozenset(
    [
        torch.Tensor.requires_grad_,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        *_accessors("requires_grad", "grad"),
    ]
)


def refuse(name: str, operation: str) -> NoReturn:
    """Raises RuntimeError: ``operation`` asks for parameter ``name`` where it is sharded."""
    module = name.rpartition(".")[0] or "the module"
    raise RuntimeError(
        f"{operation} needs parameter {name!r}, which is sharded here: this rank has only its part "
        f"of it while the wrapper that holds it ({module!r}, or one around it) is not in its "
        f"forward. Call the wrapper, not a module inside it, and {module!r} instead of reading its "
        "parameter; or leave it out of the policy, so that it belongs to the wrapper of the module "
        "that reads it (tied weights: assign one nn.Parameter to both modules before wrapping); "
        "or, for a method other than forward, call "
        "xla_fsdp.register_fsdp_forward_method(wrapper, 'method') once"
    )


def refuse_replacement(name: str) -> NoReturn:
    """Raises RuntimeError: parameter ``name`` is, or is to be, another tensor than its shard."""
    raise RuntimeError(
        f"parameter {name!r} is another tensor than the shard that the wrapper gathers: it was "
        "assigned (module.weight = ...), deleted, or given to torch.func.functional_call. A "
        "wrapped module computes with its shards: copy values into them with load_state_dict or "
        "load_full_state_dict, replace parameters before wrapping, give functional_call the "
        "unwrapped module"
    )
