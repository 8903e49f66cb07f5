"""Freeing gathered parameters, and keeping what autograd shares with them out of harm's way.

The only module that exchanges the data behind an XLA tensor, but for ``ranks/cpu/session.py``,
below it, which marks what an abort left without a value. An XLA tensor has no storage to release:
it is freed by resizing it to one element, which drops its hold on the device buffer (or, while
tracing, on the pending computation) wherever the tensor object is still referenced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .. import xlac

# See :func:`stamps`.
Stamp = tuple[int, int]


def stamps(tensors: Iterable[torch.Tensor]) -> list[Stamp]:
    """For each tensor something that is another one whenever its value is another.

    On XLA computations and ``.data = ...`` give a tensor another number, copies into it another
    version. On the CPU ``.data = ...`` gives it another address; see ``host_shard.py`` for what
    is not seen there. Takes a fraction of a microsecond each.
    """
    number = xlac.tensor_id
    with torch._C.DisableTorchFunction():  # CPU ranks look at every function, this one too
        return [
            (
                number(t) if t.device.type == "xla" else t.data_ptr(),
                0 if t.is_inference() else t._version,
            )
            for t in tensors
        ]


def free_(tensors: Iterable[torch.Tensor], placeholder: torch.Tensor) -> None:
    """Resizes each tensor to one element, in place. ``placeholder`` is a one-element XLA tensor.

    Views and copies taken earlier keep their own values: they do not share data on XLA.
    """
    for tensor in tensors:
        _replace(tensor, placeholder)


def fill_(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Gives freed tensors their values again, in place; shapes become those of ``values``."""
    for tensor, value in zip(tensors, values, strict=True):
        _replace(tensor, value)


def assign_(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Gives tensors that were not freed values of the same shape, for good: autograd and views see
    that they changed.

    Without telling functionalization, what is derived from a tensor that was once changed in place
    (``detach()``, and so every state dict) would go on having its old value.
    """
    with torch._C.DisableTorchFunctionSubclass():
        fill_(tensors, values)
        for tensor in tensors:
            if torch._is_functional_tensor(tensor):
                torch._functionalize_commit_update(tensor)
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.is_inference():  # has no version counter
        xlac.replace_data(tensor, value)
        return
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        xlac.replace_data(tensor, value)


def release_original_(parameter: torch.Tensor) -> None:
    """Drops the values of a parameter that has been sharded; the object stays, empty.

    Other modules may still hold the object (tied weights that are wrapped later), so it cannot
    simply be forgotten: with it the full values would stay in memory.
    """
    with torch.no_grad():
        if parameter.device.type == "xla":
            free_([parameter], parameter.new_zeros(1))
        else:
            parameter.data = parameter.data.new_empty(0)
