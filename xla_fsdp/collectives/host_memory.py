"""Tensors of a program that wait in the host's memory instead of HBM.

XLA has no operation for it: a value lies there because a custom call says so, and the TPU compiler
makes the copies, which run beside compute. Only within a program: what is there has to come back
before it is computed with, and cannot be an output. Other compilers do not know the call, so on
CPU ranks it is left out.

The compiler starts a copy to the device as early as it can, and one to the host as late, unless a
value that is computed meanwhile depends on it (a barrier is gone by then). So :func:`fetch` reads
from a place that another tensor decides on, and what :func:`arrived` returns, a few elements that
have been there, decides on what comes next. Neither ever says anything but zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm

from .. import xlac
from ..ranks.rank import current_rank

_CALL = "annotate_device_placement"
_SUBLANES = 8  # rows of a tile: in multiples of them a matrix can be cut without a copy


def can_wait_there(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on a device that has another memory than the host.

    Also on CPU ranks that trace what a TPU would get.
    """
    rank = current_rank()
    return tensor.device.type == "xla" and (
        _on_tpu(tensor) or (rank is not None and rank.as_on_tpu)
    )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in the host's memory."""
    return _placed(tensor, "pinned_host")


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device of what :func:`to_host` returned, or of a slice of it."""
    return _placed(tensor, "device")


def can_be_stored(shape: torch.Size) -> bool:
    """Whether :func:`store` takes a tensor of this shape.

    Slices of what is on the host are along one dimension, which must not be one of the last two:
    these are tiled. So a tensor is stored as ``(n, 8, w)``, which is no copy where its rows are a
    multiple of 8, or else as ``(n, s, w)``.
    """
    return len(shape) > 2 or (len(shape) == 2 and shape[0] % _SUBLANES == 0)


def store(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the host's memory, ``(n + 1, s, w)``: one row more, which says nothing.

    A slice of all there is could start at one place only, and the compiler would know it.
    """
    *_, s, w = tensor.shape
    s = _SUBLANES if tensor.shape[-2] % _SUBLANES == 0 else s
    rows = to_host(torch.view_copy(tensor, (-1, s, w)))
    return _computed(_stored, rows, [tensor])


def arrived(host: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """The first row of what :func:`store` returned, back on the device; ``event``: any tensor."""
    return to_device(_computed(_first_row, host, [event]))


def fetch(host: torch.Tensor, shape: torch.Size, events: Sequence[torch.Tensor]) -> torch.Tensor:
    """What was stored, of that shape, back on the device, not before ``events`` are there."""
    return to_device(_computed(_all_rows_but_one, host, events)).view(shape)


def never(event: torch.Tensor) -> torch.Tensor:
    """``[False]`` whatever is in ``event``, but only the program that runs knows."""
    return torch.slice_copy(event.reshape(-1), 0, 0, 1) > math.inf


def _stored(rows: xb.Op, at: xb.Op) -> xb.Op:
    n, *rest = rows.shape().sizes
    empty = xb.Op.scalar(rows.builder(), 0, dtype=rows.shape().dtype).broadcast([n + 1, *rest])
    return empty.dynamic_update_slice(rows, [at, *_zeros(at, len(rest))])


def _first_row(host: xb.Op, at: xb.Op) -> xb.Op:
    _, *rest = host.shape().sizes
    return host.dynamic_slice([at, *_zeros(at, len(rest))], [1, *rest])


def _all_rows_but_one(host: xb.Op, at: xb.Op) -> xb.Op:
    n, *rest = host.shape().sizes
    return host.dynamic_slice([at, *_zeros(at, len(rest))], [n - 1, *rest])


def _zeros(at: xb.Op, count: int) -> list[xb.Op]:
    return [xb.Op.scalar(at.builder(), 0, dtype=xb.Type.S32)] * count


def _computed(
    function: Callable[[xb.Op, xb.Op], xb.Op],
    tensor: torch.Tensor,
    events: Sequence[torch.Tensor],
) -> torch.Tensor:
    """``function`` of a tensor and a place in it, which is 0, but not before ``events``."""
    place = torch.zeros(1, dtype=torch.int32, device=tensor.device)
    for event in events:
        place = place + never(event)
    builder = xb.create_builder("host_memory")
    given, at = (
        xb.mkparam(builder, number, xb.mkshape(xb.Op.from_torch_type(t.dtype), tuple(t.shape)))
        for number, t in enumerate((tensor, place))
    )
    computation = xb.Op.tuple([function(given, at.reshape([]))]).build("host_memory")
    made = xlac.call_computation("xla::host_memory", [tensor, place], computation)
    return made[0]


def _on_tpu(tensor: torch.Tensor) -> bool:
    return xm.xla_device_kind(tensor.device).startswith("TPU")


def _placed(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    if not _on_tpu(tensor):
        return tensor
    placed = xlac.custom_call(
        [tensor], _CALL, [list(tensor.shape)], [tensor.dtype], True, "", 0,
        {"_xla_buffer_placement": memory},
    )  # fmt: skip
    return placed[0]
