"""An all-gather with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla.runtime as xr
from torch.autograd.function import once_differentiable

from ..collectives.world import World

_LABEL = "all_gather_with_grad"


def all_gather_with_grad(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenates the ``tensor`` of every rank along ``dim``, in the order of the ranks.
    Collective.

    All ranks pass the same shape and dtype. Gradients are summed over the ranks, as in
    ``torch.distributed.nn.all_gather``, and FSDP takes the mean: if every rank computes the same
    loss, or the loss of its own examples, parameters get the gradient of the loss on the global
    batch.

    Args:
        tensor: on the XLA device, with at least one dimension.
        dim: the dimension to concatenate.

    Raises:
        ValueError: ``tensor`` is on another device, or has no dimension.
    """
    if tensor.device.type != "xla":
        raise ValueError(
            f"all_gather_with_grad needs a tensor on the XLA device, got one on {tensor.device}: "
            "pass tensor.to('xla')"
        )
    if not tensor.dim():
        raise ValueError(
            "all_gather_with_grad cannot concatenate a tensor without dimensions: pass tensor[None]"
        )
    if xr.world_size() == 1:
        return tensor
    return _Gather.apply(tensor.movedim(dim, 0)).movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.world = World.to_reduce_over(None, rows.device)
        return ctx.world.all_gather(rows, _LABEL)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.world.reduce_scatter(grad, _LABEL)
