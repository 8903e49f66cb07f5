"""Runs a function on autograd's thread for a device. That thread outlives launches and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_there(device: torch.device, task: Callable[[], object]) -> None:
    """Calls ``task`` on the thread that runs backward passes on ``device``, an XLA device.

    Returns when ``task`` has returned.

    Raises:
        RuntimeError: autograd has no such thread.
    """
    has_begun = False

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            nonlocal has_begun
            has_begun = True
            task()
            return grad

    try:
        with torch.enable_grad():
            Call.apply(torch.zeros((), device=device, requires_grad=True)).backward()
    except RuntimeError as error:
        if has_begun:
            raise
        raise RuntimeError(
            f"autograd has no thread for {device}: this process ran a backward before XLA's "
            "runtime started, and autograd creates its threads in the first backward. Call "
            "torch_xla.device() before that backward, or run it in a separate process"
        ) from error
