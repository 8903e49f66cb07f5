"""How gradients of shards are read and added up, with the hooks that autograd calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .layout import spec_of
from .sharded_parameter import as_sharded, on_local_parts


def reduced_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """``parameter.grad``, without what ``no_sync`` stores."""
    with on_local_parts():
        return parameter.grad


def hooks_of(shard: torch.Tensor) -> tuple[list[Callable], list[Callable]]:
    """The hooks that get a gradient, and those after it was accumulated."""
    after = getattr(shard, "_post_accumulate_grad_hooks", None) or {}
    return list((shard._backward_hooks or {}).values()), list(after.values())


def accumulate(shard: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds ``grad`` to the gradient of ``shard`` as autograd would, with hooks."""
    spec = spec_of(shard)
    grad = grad if spec is None else as_sharded(grad, spec)
    before_sum, after_sum = hooks_of(shard)
    for hook in before_sum:
        changed = hook(grad)
        grad = grad if changed is None else changed
    # Autograd's own gradient, of a penalty, is a plain tensor; and what `no_sync` stores stays.
    with on_local_parts():
        before = shard.grad
        if before is not None and grad.device.type == "cpu":  # host memory may be scarce
            before.add_(grad)
        else:
            shard.grad = grad if before is None else before + grad
    for hook in after_sum:
        hook(shard)


def accumulate_sums(given: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Accumulates the sum of each shard's gradients: autograd calls hooks once in a backward.

    Several passes or units may have used a shard. The gradients are changed.
    """
    sums: dict[torch.Tensor, torch.Tensor] = {}
    for shard, grad in given:
        sums[shard] = sums[shard].add_(grad) if shard in sums else grad
    for shard, total in sums.items():
        accumulate(shard, total)
