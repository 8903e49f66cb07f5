"""Giving shards gradients outside of autograd."""

from __future__ import annotations

import torch

from .shard_spec import spec_of
from .sharded_parameter import as_sharded


def accumulate(shard: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds ``grad``, this rank's part, to that of ``shard`` as autograd would, hooks included."""
    spec = spec_of(shard)
    grad = grad if spec is None else as_sharded(grad, spec)
    for hook in list((shard._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    if shard.grad is None:
        shard.grad = grad
    elif grad.device.type == "cpu":  # where memory may be short
        shard.grad.add_(grad)
    else:
        shard.grad = shard.grad + grad
    for hook in list((getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(shard)
