"""Values of the host as data of a program."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla.core.xla_model as xm


def as_data(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``value``, which is on the host, on ``device``.

    A transfer and no program, whatever the size. ``.to()`` makes a constant of a single element:
    with another value the program would be another one, and all ranks must have the same.
    """
    sent: Any = xm.send_cpu_data_to_device([value], device)  # a list, whatever its annotation says
    return sent[0]
