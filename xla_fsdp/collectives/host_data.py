"""Host values as program inputs instead of constants."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla.core.xla_model as xm


def as_data(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sends ``value``, which is on the host, to ``device``.

    This is a transfer and no program, whatever the size. ``.to()`` would make a constant of a
    single element, and the program would differ for each value; all ranks must have the same one.
    """
    sent: Any = xm.send_cpu_data_to_device([value], device)  # a list, whatever its annotation says
    return sent[0]
