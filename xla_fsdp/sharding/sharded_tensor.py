"""A stored tensor, and the module attributes and released parameters that belong to it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..collectives.world import World
from ..tree import tensors_in
from .freeing import free_
from .layout import Layout, ShardSpec, TensorSpec
from .shard_reductions import operation_name, unreduced_error
from .sharded_parameter import local, make_sharded

if TYPE_CHECKING:
    from ..offload import ShardCopy
    from .comms import Communicator


class FlattenedParameter(torch.Tensor):
    """The placeholder of a parameter in a flattened vector: its shape, dtype and device, no values.

    Operations that need its values raise RuntimeError.
    """

    _vector: nn.Parameter
    _owner: Communicator
    _own_name: str  # in the unit's module
    _is_param: bool

    @staticmethod
    def __new__(
        cls, shape: torch.Size, vector: nn.Parameter, owner: Communicator, name: str
    ) -> FlattenedParameter:
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=vector.dtype, device=owner.world.device
        )
        made._is_param = True  # isinstance(..., nn.Parameter)
        made._vector, made._owner, made._own_name = vector, owner, name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READ_OF_THE_VECTOR:
                return func(args[0]._vector)
            if operation_name(func) not in _SET_ON_THE_VECTOR:
                return func(*args, **(kwargs or {}))
        _raise_flattened(tensors_in((args, kwargs), cls)[0], operation_name(func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is not a classmethod's
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> NoReturn:
        _raise_flattened(tensors_in((args, kwargs), cls)[0], f"{func}")

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenedParameter:
        vector = copy.deepcopy(self._vector, memo)
        return FlattenedParameter(self.shape, vector, self._owner, self._own_name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self._owner.label + self._own_name
        return f"FlattenedParameter({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


_READ_OF_THE_VECTOR = (torch.Tensor.dtype.__get__, torch.Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
_SET_ON_THE_VECTOR = (
    ".data", ".grad", ".requires_grad", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook",
)  # fmt: skip


def flattened_in(module: nn.Module) -> dict[str, FlattenedParameter]:
    """Placeholders among the attributes of ``module``, by name."""
    found = vars(module).items()
    return {name: value for name, value in found if isinstance(value, FlattenedParameter)}


def _raise_flattened(parameter: FlattenedParameter, operation: str) -> NoReturn:
    name = parameter._owner.label + parameter._own_name
    raise RuntimeError(
        f"{operation} needs parameter {name!r}, which is sharded here, in a flattened "
        "vector (flatten_parameters), and has values only during a forward. To use it in a "
        "forward, call the wrapper, not a module inside it; if weights are tied, assign one "
        "nn.Parameter to both modules before wrapping. For a method other than forward, call "
        "xla_fsdp.register_fsdp_forward_method(wrapper, 'method') once. Elsewhere, compute within "
        "FSDP.summon_full_params(model), and change the vectors in model.parameters()"
    )


def raise_replaced(name: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name!r} is not the shard that the wrapper gathers: it was assigned "
        "(module.weight = ...), deleted, or given to torch.func.functional_call or torch.export. "
        "To change values, copy them into the shards with load_state_dict or load_full_state_dict; "
        "replace parameters before wrapping; functional_call and torch.export need a model that is "
        "not wrapped, with the values that full_state_dict returns"
    )


@dataclass(eq=False)
class ShardedTensor:
    """One stored tensor: this rank's shard of a parameter, or of several (flattened).

    Units that share a parameter (tied weights) have the same object.
    """

    shard: nn.Parameter
    layout: Layout
    key: str  # name in the wrapper that sharded it
    flattened: bool = False  # registered on the wrapper
    wide: bool = False  # computed in the dtype of the shard
    # The ranks with the other shards; None inside a trace.
    world: World | None = None
    summoned: Any = None  # its `FullParameters`, see summon.py
    # Inside no_sync: where units store full gradients of it, and under which number.
    unreduced: list[tuple[dict[int, torch.Tensor], int]] = field(default_factory=list)
    copy: ShardCopy | None = None  # on the device, of a shard on the host
    widens: bool = False  # a gradient keeps the dtype of the reduction
    reordered: bool = False  # its values came from files with another order of parameters
    # For a flat vector: by member, attributes that users set.
    attributes: Sequence[dict[str, Any]] = ()
    comms: Communicator | None = None  # of the unit that sharded it

    @property
    def name(self) -> str:
        """From the root module if that is known."""
        return self.key if self.comms is None else self.comms.label + self.key

    def attributes_of(self, member: int) -> dict[str, Any]:
        """The attributes of full parameter ``member``, those of users and of this package."""
        return self.attributes[member] if self.flattened else vars(self.shard)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.key, self.layout, self.shard.dtype, self.wide)

    @property
    def source(self) -> torch.Tensor:
        """What this rank sends in a gather, a plain tensor."""
        return local(self.shard) if self.copy is None else self.copy.send()

    def drop_unreduced(self) -> None:
        """Drops gradients that ``no_sync`` stored."""
        for store, number in self.unreduced:
            store.pop(number, None)
        self.unreduced = []

    def shard_spec(self) -> ShardSpec | None:
        if self.world is None:
            return None
        shape = local(self.shard).shape
        depth = 0 if tuple(shape) == self.layout.shard_shape else shape[0]
        return ShardSpec(self.layout, self.world, depth, self.flattened, weakref.ref(self))


@dataclass(eq=False)
class ParameterSlot:
    """A module attribute that is full parameter ``index`` while the unit computes."""

    module: nn.Module
    name: str
    index: int
    sharded_value: nn.Parameter | None  # its value otherwise: the shard, or None if flattened
    block: str = ""  # for scanned blocks: the number of the block
    shown: FlattenedParameter | None = None  # a placeholder, if `sharded_value` is None

    def put(self, full: Any) -> None:
        vars(self.module).pop(self.name, None)
        self.module._parameters[self.name] = full

    def restore_sharded(self) -> None:
        self.module._parameters[self.name] = self.sharded_value
        if self.shown is not None:
            vars(self.module)[self.name] = self.shown


# On a shard or a parameter that was sharded: its ShardedTensor, and its number there.
_SHARDED_TENSOR = "_xla_fsdp_sharded_tensor"


def set_sharded_tensor(parameter: nn.Parameter, tensor: ShardedTensor, number: int = 0) -> None:
    setattr(parameter, _SHARDED_TENSOR, (tensor, number))


def mark_shards(tensors: Iterable[ShardedTensor]) -> None:
    """Marks shards with their tensor and type.

    They refer only weakly back, so device memory is freed without the garbage collector.
    """
    for tensor in tensors:
        setattr(tensor.shard, _SHARDED_TENSOR, (weakref.ref(tensor), 0))
        spec = tensor.shard_spec()
        if spec is not None:
            make_sharded(tensor.shard, spec)


def sharded_tensor_of(parameter: object) -> ShardedTensor | None:
    """The sharded tensor of ``parameter``, a shard or sharded since; ``None`` for others.

    Raises RuntimeError for a shard with a gradient of a wrapper that no longer exists.
    """
    sharded, _ = getattr(parameter, _SHARDED_TENSOR, (None, 0))
    if not isinstance(sharded, weakref.ref):
        return sharded
    tensor = sharded()
    if tensor is None and parameter.grad is not None:  # type: ignore[attr-defined]
        shape = list(parameter.shape)  # type: ignore[attr-defined]
        raise RuntimeError(
            f"a parameter of shape {shape} is the shard of a wrapper that no longer exists, so its "
            "full parameter is not known. Keep a reference to the model while you use its "
            "parameters"
        )
    return tensor


def sharded_tensors_of(parameters: Iterable[object]) -> Iterator[ShardedTensor]:
    return filter(None, map(sharded_tensor_of, parameters))


def member_number_of(parameter: nn.Parameter) -> int:
    return getattr(parameter, _SHARDED_TENSOR)[1]


def require_reduced(parameters: Iterable[object], what: str) -> None:
    """Raises RuntimeError if ``no_sync`` stores gradients, which ``what`` would ignore."""
    for parameter in parameters:
        sharded = sharded_tensor_of(parameter)
        if sharded is not None and sharded.unreduced:
            raise unreduced_error(what, sharded.key)


# These need no values, or move modules.
_HARMLESS = frozenset(
    """__hash__ __repr__ __deepcopy__ size dim ndimension numel nelement
    element_size is_floating_point is_complex is_signed is_contiguous is_inference is_pinned
    is_shared stride storage_offset data_ptr untyped_storage get_device requires_grad_ retain_grad
    detach clone to cpu cuda xla type type_as float double half bfloat16 contiguous empty_like
    new_empty register_hook _has_compatible_shallow_copy_type""".split()
)


class ReleasedParameter(nn.Parameter):
    """The object that was a parameter before it was sharded, and that a list or closure may keep.

    It is empty: a sum over it would silently be 0. So operations on its values raise RuntimeError.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, sets = operation_name(func), len(args) > 1
        if name == ".grad" and not sets:
            sharded = sharded_tensor_of(args[0])
            if sharded is not None and sharded.shard.grad is not None:
                remedy = "Read gradients from model.parameters() after wrapping"
                _raise_released(".grad was read from", args[0], remedy)
        if name == "requires_grad_" or (name == ".requires_grad" and sets):
            _require_no_change(*args, **(kwargs or {}))
        moves = name != ".data" or not sets or isinstance(args[1], cls)  # with its module
        if not moves or (name not in _HARMLESS and not name.startswith(".")):
            _raise_released(
                f"{name if moves else 'an assignment to .data'} needs the values of",
                tensors_in((args, kwargs), cls)[0],
                "In a forward, read the parameter as an attribute of its module "
                "(self.layer.weight); elsewhere, take shards from model.parameters() after "
                "wrapping, or full parameters within FSDP.summon_full_params(model)",
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            # Ours is empty; any other gradient was set by the user.
            ours = type(found) is torch.Tensor and found.numel() <= 1
            return found.as_subclass(cls) if ours and args and found is not args[0].grad else found


@torch.no_grad()
def release(parameter: nn.Parameter) -> None:
    """Frees the values of ``parameter``, to which other modules may still refer."""
    if parameter.device.type == "xla":
        free_([parameter], parameter.new_zeros(1))
    else:
        parameter.data = parameter.data.new_empty(0)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ReleasedParameter


def _require_no_change(parameter: torch.Tensor, requires_grad: bool = True) -> None:
    # A moved parameter is another object, and gets the first one's value.
    moved = sharded_tensor_of(parameter) is None and requires_grad
    if parameter.requires_grad is not requires_grad and not moved:
        _raise_released(
            f"requires_grad={requires_grad} has no effect on",
            parameter,
            "Freeze and unfreeze parameters of the wrapped model (model.named_parameters()); "
            "scanned blocks only together",
        )


def _raise_released(problem: str, parameter: torch.Tensor, remedy: str) -> NoReturn:
    sharded = sharded_tensor_of(parameter)
    there = "now in a wrapper or in scanned blocks"
    where = there if sharded is None else f"{sharded.key!r} in its wrapper"
    raise RuntimeError(
        f"{problem} a parameter object of before the wrapping (kept in a list, a variable or a "
        f"closure). The parameter was sharded ({where}), so that object is empty. {remedy}"
    )
