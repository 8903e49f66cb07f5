"""Tensors of a program that wait in the host's memory instead of HBM.

XLA has no operation for it: a value lies there because a custom call says so, and the TPU compiler
makes the copies, which run beside compute. Only within a program: what is there has to come back
before it is computed with, and cannot be an output. Other compilers do not know the call: see
:func:`can_wait_there`.

The compiler starts a copy to the device as early as it can, and one to the host as late, unless a
value that is computed meanwhile depends on it (a barrier is gone by then). So :func:`fetch` reads
from a place that another tensor decides on, and what :func:`arrived` returns, a few elements that
have been there, decides on what comes next. Neither ever says anything but zero.
"""

from __future__ import annotations

import math

import torch
import torch_xla
import torch_xla.core.xla_builder as xb

_CALL = "annotate_device_placement"
_SUBLANES = 8  # rows of a tile: in multiples of them a matrix can be cut without a copy


def can_wait_there(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on a device that has another memory than the host."""
    if tensor.device.type != "xla":
        return False
    return torch_xla._XLAC._xla_device_kind(str(tensor.device)).startswith("TPU")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in the host's memory."""
    return _placed(tensor, "pinned_host")


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device of what :func:`to_host` returned, or of a slice of it."""
    return _placed(tensor, "device")


def rows_of(shape: torch.Size) -> tuple[int, int, int] | None:
    """The shape, ``(n, s, w)`` with ``n`` from 2 on, in which such a tensor travels in parts.

    Slices of what is on the host are along one dimension, and not the last two, which are tiled.
    ``None``: it has no such shape that its layout on a TPU allows without a copy.
    """
    if len(shape) < 2 or not shape.numel():
        return None
    *before, s, w = shape
    n = math.prod(before)
    if s % _SUBLANES == 0:
        n, s = n * s // _SUBLANES, _SUBLANES
    return (n, s, w) if n > 1 else None


def arrived(host: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """The first row of ``host``, ``(n, s, w)``, back on the device; ``event``: any tensor."""
    return to_device(_part(host, event, 0, 1))


def fetch(host: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """``host``, ``(n, s, w)``, back on the device, not before ``event`` is there.

    In two parts: a slice of all of it could start at one place only.
    """
    half = host.shape[0] // 2
    parts = [(0, half), (half, host.shape[0] - half)]
    return torch.cat([to_device(_part(host, event, *part)) for part in parts])


def never(event: torch.Tensor) -> torch.Tensor:
    """``[False]`` whatever is in ``event``, but only the program that runs knows."""
    return torch.slice_copy(event.reshape(-1), 0, 0, 1) > math.inf


def _part(host: torch.Tensor, event: torch.Tensor, first: int, rows: int) -> torch.Tensor:
    offset = never(event).to(torch.int32)
    builder = xb.create_builder("part_on_host")
    given = [
        xb.mkparam(builder, number, xb.mkshape(xb.Op.from_torch_type(t.dtype), tuple(t.shape)))
        for number, t in enumerate((host, offset))
    ]
    zero = xb.Op.scalar(builder, 0, dtype=xb.Type.S32)
    at = given[1].reshape([]) + xb.Op.scalar(builder, first, dtype=xb.Type.S32)
    part = given[0].dynamic_slice([at, zero, zero], [rows, *host.shape[1:]])
    computation = xb.Op.tuple([part]).build("part_on_host")
    parts: list[torch.Tensor] = torch_xla._XLAC._xla_user_computation(
        "xla::part_on_host", [host, offset], computation
    )
    return parts[0]


def _placed(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    placed: list[torch.Tensor] = torch_xla._XLAC._xla_custom_call(
        [tensor], _CALL, [list(tensor.shape)], [tensor.dtype], True, "", 0,
        {"_xla_buffer_placement": memory},
    )  # fmt: skip
    return placed[0]
