"""Autograd's thread for a device, which outlives launches and plans and knows nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
