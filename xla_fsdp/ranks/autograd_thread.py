"""Autograd's thread for a device, which outlives launches and plans and knows nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_xla


def start_program(device: torch.device) -> None:
    """Starts what was traced for ``device``, as ``torch_xla.sync()`` does, which on autograd's
    thread would ask another device: that thread has a default of its own."""
    torch_xla._XLAC._xla_step_marker(str(device), [], wait=False)


def run_there(device: torch.device, task: Callable[[], object]) -> None:
    """Has the thread that runs backwards on ``device``, an XLA device, call ``task``.

    Returns when it has.
    """

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            task()
            return grad

    with torch.enable_grad():
        Call.apply(torch.zeros((), device=device, requires_grad=True)).backward()
