"""Frees and refills gathered parameters.

An XLA tensor has no storage to release: it is freed by replacing its data with one element. Only
this module and ``ranks/cpu/session.py`` call ``xlac.replace_data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .. import xlac

Stamp = tuple[int, int]


def stamps(tensors: Iterable[torch.Tensor]) -> list[Stamp]:
    """For each tensor a stamp that changes whenever its value changes.

    On XLA, computations and ``.data = ...`` change the tensor's id, copies into it its version. On
    the CPU, see ``cpu_offload.py`` for what stamps miss.
    """
    number = xlac.tensor_id
    with torch._C.DisableTorchFunction():  # CPU ranks intercept every torch function, this one too
        return [
            (
                number(t) if t.device.type == "xla" else t.data_ptr(),
                0 if t.is_inference() else t._version,
            )
            for t in tensors
        ]


def free_(tensors: Iterable[torch.Tensor], placeholder: torch.Tensor) -> None:
    """Resizes each tensor to one element, in place; views and copies keep their values.

    ``placeholder``: a one-element XLA tensor.
    """
    for tensor in tensors:
        _replace(tensor, placeholder)


def fill_(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Restores the values of freed tensors in place; shapes become those of ``values``."""
    for tensor, value in zip(tensors, values, strict=True):
        _replace(tensor, value)


def assign_(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Assigns values of the same shape to tensors that are not freed; autograd and views see it.

    Without notifying functionalization, tensors derived from one that was once changed in place
    would keep the old value.
    """
    with torch._C.DisableTorchFunctionSubclass():
        fill_(tensors, values)
        for tensor in tensors:
            if torch._is_functional_tensor(tensor):
                torch._functionalize_commit_update(tensor)
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.is_inference():
        xlac.replace_data(tensor, value)
        return
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        xlac.replace_data(tensor, value)
