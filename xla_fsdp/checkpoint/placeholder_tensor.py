"""Placeholder tensors without values, with which torch's state dict code can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_ATEN = torch.ops.aten
# Operations that read or replace values but do not call torch's dispatcher.
_AROUND_THE_DISPATCHER = {
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.set_,
}


class ValuesNeededError(RuntimeError):
    """Something computes with values that are not in memory."""


@dataclass
class Uses:
    """Records how the placeholder tensors of one call were used.

    Attributes:
        values_needed: an operation needed values. Then the other results of the call are invalid.
        copied: pairs of a placeholder and the tensor that was copied into it, in order.
    """

    values_needed: bool = False
    copied: list[tuple[PlaceholderTensor, torch.Tensor]] = field(default_factory=list)


class PlaceholderTensor(torch.Tensor):
    """A placeholder that has the shape and dtype of ``source``, but no values.

    ``detach()`` and other views of the full tensor have the same source. ``copy_`` of a tensor of
    its shape into it is recorded in ``uses``. Every other operation raises
    :class:`ValuesNeededError`, and records it in ``uses`` in case the caller catches the error.
    """

    source: Any
    uses: Uses

    @staticmethod
    def __new__(
        cls, source: Any, uses: Uses, shape: Iterable[int], dtype: torch.dtype
    ) -> PlaceholderTensor:
        own: PlaceholderTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        own.source, own.uses = source, uses
        return own

    def __init__(self, *args: Any) -> None:
        pass  # __new__ sets all attributes

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _AROUND_THE_DISPATCHER:
            _need_values(args, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has no classmethod in its stubs
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0]
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return cls(first.source, first.uses, first.shape, first.dtype)
        if func is _ATEN.copy_.default and isinstance(first, cls) and first.shape == args[1].shape:
            first.uses.copied.append((first, args[1]))
            return first
        return _need_values((args, kwargs), func)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"PlaceholderTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _need_values(given: Any, func: Any) -> Any:
    for each in _find_placeholders(given):
        each.uses.values_needed = True
    raise ValuesNeededError(
        f"{func} needs the values of a placeholder tensor, which has none. The placeholder was "
        "kept after the state_dict() or load_state_dict() in which it was used: keep no tensors "
        "of a state dict in hooks."
    )


def _find_placeholders(value: Any) -> Iterable[PlaceholderTensor]:
    if isinstance(value, PlaceholderTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _find_placeholders(each)
    elif isinstance(value, dict):
        yield from _find_placeholders(list(value.values()))
