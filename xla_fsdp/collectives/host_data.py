"""Values of the host as data of a program; in a plan, data without memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.utils.dlpack import from_dlpack

from ..ranks.rank import is_simulated_rank

# From so many elements on, a tensor of a plan has no values.
LARGE = 1 << 16
# XLA shares only memory at a multiple of this address.
_ALIGNMENT = 64
# Pages may exceed the memory of the host. Python 3.13 names it.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
# What torch exports by DLPack and torch_xla imports.
_SHARED = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip


def as_data(value: Any, device: torch.device) -> torch.Tensor:
    """Sends ``value``, a tensor on the host, a number or lists, to ``device``: no program.

    ``.to()`` would make a constant of one element, and another program for each value.
    """
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, device="cpu")
    if is_simulated_rank() and (shared := share(value, device)) is not None:
        return shared
    sent: Any = xm.send_cpu_data_to_device([value], device)  # a list, whatever its annotation says
    return sent[0]


def share(value: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """For plans: a tensor on ``device`` that shares the memory of ``value``, or ``None``."""
    if not (
        value.numel() >= LARGE
        and value.device.type == "cpu"
        and value.dtype in _SHARED
        and value.is_contiguous()
        and value.data_ptr() % _ALIGNMENT == 0
        and xr.device_type() == "CPU"
    ):
        return None
    shared: torch.Tensor = from_dlpack(torch.Tensor.detach(value))
    return shared if shared.device == device else None


def fake_cpu_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU for a plan; large ones take up no memory until they are written."""
    count = math.prod(shape)
    if count < LARGE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=_PAGES)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
