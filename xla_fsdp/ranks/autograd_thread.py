"""Autograd's thread for a device, which outlives launches and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_xla.runtime as xr


def in_backward() -> bool:
    """Whether this thread executes a backward, which may recompute a forward."""
    return torch._C._current_graph_task_id() != -1


class _Call(torch.autograd.Function):
    """Defined once, because each class lives until a garbage collection."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, task: Callable[[], object]) -> torch.Tensor:
        ctx.task = task
        return value * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.task()
        return grad, None


def run_there(device: torch.device, task: Callable[[], object]) -> None:
    """Calls ``task`` on autograd's thread for the XLA ``device``, and waits.

    Raises:
        RuntimeError: autograd has no such thread.
    """
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        task()

    try:
        with torch.enable_grad():
            value = torch.zeros((), device=device, requires_grad=True)
            _Call.apply(value, begin).backward()
    except RuntimeError as error:
        if has_begun:
            raise
        ranks = xr.addressable_device_count()
        raise RuntimeError(
            f"autograd has no thread for {device}: this process ran a backward before XLA's "
            "runtime started, and autograd creates its threads in the first backward. Call "
            "torch_xla.device() before that backward (for ranks, xla_fsdp.launch(lambda rank: None,"
            f" num_devices={ranks})), or run it after this call or in a separate process"
        ) from error
