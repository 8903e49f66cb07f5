"""Visits the tensors in the arguments or results of a module."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def overrides_dispatch(kind: type[torch.Tensor]) -> bool:
    """Whether such tensors override torch functions: torch_xla does not see them."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def map_tensors(
    fn: Callable[[Any], Any], value: Any, leaf: type | tuple[type, ...] = torch.Tensor
) -> Any:
    """``value`` with ``fn`` applied to every ``leaf`` in it.

    Visits mappings, lists, (named) tuples, sets, dataclass instances and ``PackedSequence``, which
    keep their types. Returns an unchanged container itself.
    """
    if isinstance(value, leaf):
        return fn(value)
    if isinstance(value, PackedSequence):
        # Lengths and permutations must keep dtype and device.
        data = map_tensors(fn, value.data, leaf)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, Mapping):
        items = {key: map_tensors(fn, item, leaf) for key, item in value.items()}
        return value if _same(items.values(), value.values()) else _rebuilt(value, items)
    if isinstance(value, (list, tuple, set, frozenset)):
        old = list(value)
        new = [map_tensors(fn, item, leaf) for item in old]
        if _same(new, old):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old_fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        fields = {name: map_tensors(fn, item, leaf) for name, item in old_fields.items()}
        if _same(fields.values(), old_fields.values()):
            return value
        # Not dataclasses.replace: fields may be init=False or checked in __post_init__.
        clone = copy.copy(value)
        for name, item in fields.items():
            object.__setattr__(clone, name, item)
        return clone
    return value


def tensors_in(value: Any, leaf: type | tuple[type, ...] = torch.Tensor) -> list[Any]:
    found: dict[int, Any] = {}
    map_tensors(lambda tensor: found.setdefault(id(tensor), tensor), value, leaf)
    return list(found.values())


class _TensorIndex:
    def __init__(self, number: int) -> None:
        self.number = number


def separate_tensors(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The distinct tensors in ``value``, and the rest for :func:`with_tensors`."""
    tensors = tensors_in(value)
    slots = {id(tensor): _TensorIndex(number) for number, tensor in enumerate(tensors)}
    return tensors, map_tensors(lambda tensor: slots[id(tensor)], value)


def with_tensors(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The reverse of :func:`separate_tensors`."""
    return map_tensors(lambda slot: tensors[slot.number], structure, leaf=_TensorIndex)


_KEEPS_DTYPE = "_xla_fsdp_keeps_dtype"


def keep_dtype(tensor: torch.Tensor) -> None:
    """Makes :func:`cast_floats` skip ``tensor``, in all wrappers."""
    setattr(tensor, _KEEPS_DTYPE, True)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        stays = not tensor.is_floating_point() or tensor.dtype == dtype
        return tensor if stays or getattr(tensor, _KEEPS_DTYPE, False) else tensor.to(dtype)

    return map_tensors(cast, value)


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(map(operator.is_, new, old))


def _rebuilt(mapping: Mapping, items: dict) -> Mapping:
    if type(mapping) is dict:
        return items
    # A copy keeps other state: a defaultdict's factory, attributes of a model-output class.
    clone: Any = copy.copy(mapping)
    for key, item in items.items():
        clone[key] = item
    return clone
