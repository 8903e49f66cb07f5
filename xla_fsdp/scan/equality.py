"""Whether blocks are equal but for the values of their parameters and buffers."""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ..names import dotted
from ..remat import Recomputed
from ..sharding.full_precision import is_widening

Described = dict[str, Any]

_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_ABSENT = object()


def describe(block: nn.Module, ignore: Collection[str]) -> Described:
    """Everything that must be equal in all blocks, by dotted name in the block.

    Classes of modules; names, shapes, dtypes and ``requires_grad`` of parameters; which of them are
    shared; names, shapes and dtypes of buffers; and the attributes of every module, except those
    called as in ``ignore``. Attributes count by value where they are numbers, strings, dtypes,
    functions, tensors, or containers of such; other objects by equality, or by type if they have
    none.
    """
    found: Described = {}
    first: dict[int, str] = {}
    for path, module in block.named_modules(remove_duplicate=False):
        found[path or "the block"] = type(module)
        for name, value in vars(module).items():
            if name not in _MACHINERY and name not in ignore:
                found[dotted(path, name)] = _value(value)
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                own = dotted(path, name)
                found[own] = None if tensor is None else _tensor(kind, tensor, first, own)
        for name in module._buffers:
            if name in module._non_persistent_buffers_set:
                found[f"persistence of {dotted(path, name)}"] = False
        require_no_hooks(path, module)
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"module {path!r} of a block is an {type(module).__name__}; recurrent modules "
                "cannot be scanned, wrap the blocks singly"
            )
    return found


def require_no_hooks(path: str, module: nn.Module) -> None:
    """Raises ValueError if ``module``, called ``path`` in a block, has hooks."""
    for hooks in _HOOKS:
        registered = getattr(module, hooks, None) or {}
        if not all(map(is_widening, registered.values())):
            raise ValueError(
                f"module {path or type(module).__name__!r} of a block has hooks "
                f"({hooks.strip('_')}); scanned blocks are traced once for all, so a hook "
                "would see one block only. Remove it, or wrap the blocks singly"
            )


def require_same(first: Described, other: Described, number: int) -> None:
    """Raises ValueError naming the first difference between block 0 and block ``number``."""
    for name in [*first, *(name for name in other if name not in first)]:
        a, b = first.get(name, _ABSENT), other.get(name, _ABSENT)
        if not _equal(a, b):
            raise ValueError(
                f"blocks must be equal in all but the values of parameters and buffers; {name}: "
                f"{_shown(a)} in block 0, {_shown(b)} in block {number}. Make them equal, or wrap "
                "the blocks singly; an attribute that does not matter for the forward can be "
                "named in ignore="
            )


def _tensor(kind: str, tensor: torch.Tensor, first: dict[int, str], own: str) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{kind} of shape {tuple(tensor.shape)}, {dtype}"
    if kind == "parameter":
        text += ", trainable" if tensor.requires_grad else ", frozen"
    shared = first.setdefault(id(tensor), own)
    return text if shared == own else f"{text}, the same as {shared}"


def _value(value: Any) -> Any:
    """``value`` in a form that compares by content."""
    if isinstance(value, functools.partial):
        return ("partial", _value(value.func), _value(value.args), _value(value.keywords))
    if isinstance(value, Recomputed):
        return ("recomputed", _value(value.original), value.offload)
    if isinstance(value, types.MethodType):
        return ("method", value.__func__)
    if isinstance(value, types.FunctionType):
        return ("function", value.__module__, value.__qualname__, value.__code__)
    if isinstance(value, Mapping):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_value(item) for item in value]
    return value


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, type):
        return _made_alike(a, b)
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and _equal_values(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(item, b[key]) for key, item in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if type(a).__eq__ is object.__eq__:
        return True  # same type, and no way to tell
    return bool(a == b)


def _made_alike(a: type, b: type) -> bool:
    # torch.nn.utils.parametrize gives every module a class of its own.
    return (
        a.__name__ == b.__name__
        and a.__name__.startswith("Parametrized")
        and a.__mro__[1:] == b.__mro__[1:]
    )


def _equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Values elsewhere than on the host could only be had by running what is pending.
    return a.device == b.device and (a.device.type != "cpu" or torch.equal(a, b))


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "nothing of that name"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, str) and value.startswith(("parameter of", "buffer of")):
        return value
    return repr(value)


def require_like(y: Any, x: torch.Tensor, block: nn.Module) -> None:
    """Raises ValueError unless ``y``, which ``block`` made of ``x``, is a tensor like ``x``."""
    if not isinstance(y, torch.Tensor):
        raise ValueError(
            f"scanned blocks must return one tensor, {type(block).__name__} returned a "
            f"{type(y).__name__}; have its forward return the tensor that the next block takes"
        )
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(
            "scanned blocks must return a tensor like the one they take, since it is what the next "
            f"one takes: {type(block).__name__} made {tuple(y.shape)}, {y.dtype} of "
            f"{tuple(x.shape)}, {x.dtype}"
        )
