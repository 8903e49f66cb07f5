"""What ``module.weight`` is while that parameter is sharded.

Usually it is the shard, a tensor subclass. A parameter inside a flattened vector has no separate
shard: its module has a placeholder attribute instead, which raises when it is used in computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

if TYPE_CHECKING:
    from .comms import Communicator


class FlattenedParameter(torch.Tensor):
    """The placeholder of a parameter whose values are inside a flattened vector.

    Has the shape, dtype and device of the full parameter, but no values.

    Raises:
        RuntimeError: by every operation that needs its values; names the parameter and the fixes.
    """

    _owner: Communicator
    _own_name: str  # in the unit's module
    _is_param: bool

    @staticmethod
    def __new__(
        cls, shape: torch.Size, vector: nn.Parameter, owner: Communicator, name: str
    ) -> FlattenedParameter:
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=vector.dtype, device=owner.world.device, requires_grad=True
        )
        made._is_param = True  # isinstance(..., nn.Parameter)
        made._owner, made._own_name = owner, name
        return made

    @property
    def name(self) -> str:
        """The dotted name, from the root module if that is known."""
        return self._owner.label + self._own_name

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _OF_THE_VALUE or func in _OF_THE_VECTOR:
            _raise_unsupported(args[0], getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is not a classmethod's
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> NoReturn:
        every = [*args, *(kwargs or {}).values()]
        flat = [x for one in every for x in (one if isinstance(one, (list, tuple)) else [one])]
        _raise_unsupported(next(one for one in flat if isinstance(one, cls)), f"{func}")

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenedParameter:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlattenedParameter({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _accessors(*names: str) -> Iterator[Any]:
    for name in names:
        attribute = getattr(torch.Tensor, name)
        yield from (attribute.__get__, attribute.__set__, attribute.__delete__)


_OF_THE_VALUE = frozenset(_accessors("data"))
# Operations on a parameter that users do, and that only the vector supports.
_OF_THE_VECTOR = frozenset(
    [
        torch.Tensor.requires_grad_,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # a descriptor in C
        *_accessors("grad"),
    ]
)


def flattened_in(module: nn.Module) -> dict[str, FlattenedParameter]:
    """The parameters of ``module``, by name, that are in a flattened vector, not gathered now."""
    found = vars(module).items()
    return {name: value for name, value in found if isinstance(value, FlattenedParameter)}


def _raise_unsupported(parameter: FlattenedParameter, operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation} needs parameter {parameter.name!r}, which is sharded here, in a flattened "
        "vector (flatten_parameters), and has values only during a forward. To use it in a "
        "forward, call the wrapper, not a module inside it; if weights are tied, assign one "
        "nn.Parameter to both modules before wrapping. For a method other than forward, call "
        "xla_fsdp.register_fsdp_forward_method(wrapper, 'method') once. Elsewhere, compute within "
        "FSDP.summon_full_params(model), and change the vectors in model.parameters()"
    )


def raise_replaced(name: str) -> NoReturn:
    """Raises RuntimeError because parameter ``name`` was replaced by a tensor that is no shard."""
    raise RuntimeError(
        f"parameter {name!r} is not the shard that the wrapper gathers: it was assigned "
        "(module.weight = ...), deleted, or given to torch.func.functional_call. To change values, "
        "copy them into the shards with load_state_dict or load_full_state_dict; replace "
        "parameters before wrapping, and give functional_call the unwrapped module"
    )
