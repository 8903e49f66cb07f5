"""The parameter object that remains after sharding, where other code still refers to it.

Examples are a module that also stores its parameters in a list (for a penalty on their norms), a
closure, or an optimizer that was made too early. The object is empty now: without the check here a
sum over it would silently be 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .sharded_tensor import sharded_tensor_of

# Operations that are allowed: those that need no values, and those that move modules.
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
    """A parameter whose values have moved to the shards of a wrapper.

    Raises:
        RuntimeError: by every operation on its values; names the parameter and the fix.
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
            _raise_unsupported(name, [*args, *(kwargs or {}).values()])
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            # Ours is empty, like this object; any other gradient was set by the user.
            ours = type(found) is torch.Tensor and found.numel() <= 1
            return found.as_subclass(cls) if ours and args and found is not args[0].grad else found


def mark_released(parameter: nn.Parameter) -> None:
    """Makes ``parameter``, which is empty, raise when something is computed with it."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ReleasedParameter


def _require_no_gradient(parameter: torch.Tensor) -> None:
    """Raises RuntimeError if ``.grad`` is read, but only the shard has a gradient."""
    sharded = sharded_tensor_of(parameter)
    if sharded is not None and sharded.shard.grad is not None:
        raise RuntimeError(
            f".grad was read from a parameter object of before the wrapping; the parameter "
            f"({sharded.key!r} in its wrapper) was sharded, and its gradient is at the shard. Read "
            "gradients from model.parameters() after wrapping"
        )


def _require_no_change(parameter: torch.Tensor, requires_grad: bool = True) -> None:
    """Raises RuntimeError if ``requires_grad`` of ``parameter`` is changed, which has no effect."""
    sharded = sharded_tensor_of(parameter)
    # A parameter that was moved is another object, without a sharded tensor; it gets the first
    # one's value.
    moved = sharded is None and requires_grad
    if parameter.requires_grad is not requires_grad and not moved:
        which = "now in scanned blocks" if sharded is None else f"{sharded.key!r} in its wrapper"
        raise RuntimeError(
            f"requires_grad={requires_grad} was set on a parameter object of before the wrapping, "
            f"which has no effect: the parameter was sharded ({which}). Freeze and unfreeze "
            "parameters of the wrapped model (model.named_parameters()); scanned blocks only "
            "together"
        )


def _raise_unsupported(operation: str, given: list[Any]) -> None:
    flat = [x for one in given for x in (one if isinstance(one, (list, tuple)) else [one])]
    mine = [one for one in flat if isinstance(one, ReleasedParameter)]
    names = [repr(sharded.key) for sharded in map(sharded_tensor_of, mine) if sharded is not None]
    which = f"{names[0]} in its wrapper" if names else "now in a wrapper or in scanned blocks"
    raise RuntimeError(
        f"{operation} needs the values of a parameter that was sharded ({which}), but was called "
        "on the parameter object of before the wrapping (kept in a list, a variable or a "
        "closure), which is empty now. In a forward, read the parameter as an attribute of its "
        "module (self.layer.weight); elsewhere, take shards from model.parameters() after "
        "wrapping, or full parameters within FSDP.summon_full_params(model)"
    )
