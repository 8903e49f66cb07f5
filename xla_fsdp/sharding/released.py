"""What is left of a parameter that was sharded, wherever somebody holds the object still.

A module that keeps its parameters in a list besides (for a penalty on their norms), a closure, an
optimizer made too early: the object is empty now, and a sum over it would be 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .sharded_tensor import home_of

# What may be asked of it: all that needs no values, and what moves modules that hold it.
_HARMLESS = frozenset(
    """__get__ __set__ __delete__ __hash__ __repr__ __deepcopy__ size dim ndimension numel nelement
    element_size is_floating_point is_complex is_signed is_contiguous is_inference is_pinned
    is_shared stride storage_offset data_ptr untyped_storage get_device requires_grad_ retain_grad
    detach clone to cpu cuda xla type type_as float double half bfloat16 contiguous empty_like
    new_empty register_hook _has_compatible_shallow_copy_type""".split()
)
_SETS_REQUIRES_GRAD = (
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # a descriptor in C
)


_GRAD: Any = torch.Tensor.grad
_GETS_GRAD = _GRAD.__get__


class ReleasedParameter(nn.Parameter):
    """A parameter whose values are in the shards of a wrapper.

    Raises:
        RuntimeError: by every operation on its values; it names the parameter and the remedy.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _GETS_GRAD:
            _require_no_gradient(args[0])
        if func in _SETS_REQUIRES_GRAD:
            _require_no_change(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name not in _HARMLESS:
            _refuse(name, [*args, *(kwargs or {}).values()])
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            # As empty as this one; a gradient is somebody's own.
            ours = type(found) is torch.Tensor and found.numel() <= 1
            return found.as_subclass(cls) if ours and args and found is not args[0].grad else found


def mark_released(parameter: nn.Parameter) -> None:
    """Has ``parameter``, which is empty, say so when something is computed with it."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ReleasedParameter


def _require_no_gradient(parameter: torch.Tensor) -> None:
    """Raises RuntimeError if the gradient that is asked for is that of a shard."""
    home = home_of(parameter)
    if home is not None and home.shard.grad is not None:
        raise RuntimeError(
            f".grad of a parameter that was sharded ({home.key!r} in its wrapper), by an object of "
            "before the wrapping, which has none: take gradients from model.parameters() after "
            "wrapping"
        )


def _require_no_change(parameter: torch.Tensor, requires_grad: bool = True) -> None:
    """Raises RuntimeError if ``parameter`` is to be frozen or trained, which is up to its shard."""
    home = home_of(parameter)
    # Moved, it is another object, without a home, which is given what the first one had.
    moved = home is None and requires_grad
    if parameter.requires_grad is not requires_grad and not moved:
        which = "held by scanned blocks now" if home is None else f"{home.key!r} in its wrapper"
        raise RuntimeError(
            f"requires_grad={requires_grad} of a parameter that was sharded ({which}) by an object "
            "of before the wrapping has no effect: freeze and unfreeze parameters of the wrapped "
            "model (model.named_parameters()); those of scanned blocks all at once"
        )


def _refuse(operation: str, given: list[Any]) -> None:
    flat = [x for one in given for x in (one if isinstance(one, (list, tuple)) else [one])]
    mine = [one for one in flat if isinstance(one, ReleasedParameter)]
    names = [repr(home.key) for home in map(home_of, mine) if home is not None]
    which = f"{names[0]} in its wrapper" if names else "held by a wrapper or scanned blocks now"
    raise RuntimeError(
        f"{operation} needs the values of a parameter that was sharded ({which}), by an object of "
        "before the wrapping: kept in a list, a variable or a closure it is empty now. In a "
        "forward read it as an attribute of its module (self.layer.weight); elsewhere take shards "
        "from model.parameters() after wrapping, or full values in FSDP.summon_full_params(model)"
    )
