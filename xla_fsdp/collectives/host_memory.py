"""Stores tensors of a program in host memory instead of HBM.

A value in host memory must be copied back before it is computed with, and cannot be an output. The
TPU compiler copies to the device as early and to the host as late as it can, whatever the barriers.
So :func:`fetch` reads from an offset, always zero, that is computed from other tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm

from .. import xlac
from ..ranks.rank import current_rank
from ..tpu.chips import SUBLANES

_CALL = "annotate_device_placement"


def can_offload(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on a TPU, or on a CPU rank that traces the program of a TPU."""
    rank = current_rank()
    return tensor.device.type == "xla" and (
        _on_tpu(tensor) or (rank is not None and rank.as_on_tpu)
    )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    return _placed(tensor, "pinned_host")


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device of a result of :func:`to_host`, or of a slice of it."""
    return _placed(tensor, "device")


def can_be_stored(shape: torch.Size) -> bool:
    """Whether :func:`store` supports this shape: the last two dimensions cannot be sliced."""
    return len(shape) > 2 or (len(shape) == 2 and shape[0] % SUBLANES == 0)


def store(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory, ``(n + 1, s, w)``, with one unused row at the end.

    If :func:`fetch` read all rows, the compiler would know the offset.
    """
    *_, s, w = tensor.shape
    s = SUBLANES if tensor.shape[-2] % SUBLANES == 0 else s
    rows = to_host(torch.view_copy(tensor, (-1, s, w)))
    return _computed(_stored, rows, [tensor])


def arrived(host: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """The first row of the result of :func:`store`, on the device; ``event``: any tensor."""
    return to_device(_computed(partial(_rows, 1), host, [event]))


def fetch(host: torch.Tensor, shape: torch.Size, events: Sequence[torch.Tensor]) -> torch.Tensor:
    """The stored tensor, in ``shape``, copied to the device after ``events`` exist."""
    return to_device(_computed(partial(_rows, len(host) - 1), host, events)).view(shape)


def never(event: torch.Tensor) -> torch.Tensor:
    """``[False]`` for any ``event``, but the compiler cannot know it before the program runs."""
    return torch.slice_copy(event.reshape(-1), 0, 0, 1) > math.inf


def _stored(rows: xb.Op, at: xb.Op) -> xb.Op:
    n, *rest = rows.shape().sizes
    empty = xb.Op.scalar(rows.builder(), 0, dtype=rows.shape().dtype).broadcast([n + 1, *rest])
    return empty.dynamic_update_slice(rows, [at, *_zeros(at, len(rest))])


def _rows(count: int, host: xb.Op, at: xb.Op) -> xb.Op:
    _, *rest = host.shape().sizes
    return host.dynamic_slice([at, *_zeros(at, len(rest))], [count, *rest])


def _zeros(at: xb.Op, count: int) -> list[xb.Op]:
    return [xb.Op.scalar(at.builder(), 0, dtype=xb.Type.S32)] * count


def _computed(
    function: Callable[[xb.Op, xb.Op], xb.Op],
    tensor: torch.Tensor,
    events: Sequence[torch.Tensor],
) -> torch.Tensor:
    """``function`` of a tensor and an offset, which is 0 but is computed from ``events``."""
    place = torch.zeros(1, dtype=torch.int32, device=tensor.device)
    for event in events:
        place = place + never(event)
    builder = xb.create_builder("host_memory")
    given, at = (
        xb.mkparam(builder, number, xb.mkshape(xb.Op.from_torch_type(t.dtype), tuple(t.shape)))
        for number, t in enumerate((tensor, place))
    )
    with torch.device("cpu"):  # torch_xla makes constants on the default device
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
