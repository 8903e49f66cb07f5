"""``MixedPrecision(keep_low_precision_grads=True)``: gradients narrower than their shards."""

from __future__ import annotations

import torch

from .unit import Unit


@torch.no_grad()
def narrow_gradients(unit: Unit) -> None:
    """After a backward: gives the gradients of ``unit`` the dtype that it computes in.

    torch accumulates the next backward's into them as they are. A no-op without the option.
    """
    policy = unit.options.mixed_precision
    if policy is None or not policy.keep_low_precision_grads or policy.param_dtype is None:
        return
    for tensor, holder, _ in unit.holders():
        if holder.grad is not None and holder.is_floating_point() and not tensor.wide:
            if holder.grad.dtype is not policy.param_dtype:
                # Only the data of a gradient may have another dtype than its parameter.
                holder.grad.data = holder.grad.to(policy.param_dtype)
