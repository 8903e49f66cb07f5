"""Hooks that users register on shards: called when plain torch would call them.

One node of the graph stands for all parameters of a unit. Its backward hands every shard something,
and nothing (``None``) to those that got no gradient; autograd calls their hooks all the same: one
on the gradient with ``None``, and one that follows the accumulation with the gradient of an earlier
backward, which it would take for a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Attributes of a shard that stand before the methods of these names.
REPLACED = frozenset({"register_hook", "register_post_accumulate_grad_hook"})


def guard_hooks(shard: nn.Parameter) -> None:
    """Has what is registered on ``shard`` from now on called for gradients only."""
    for name, method in (
        ("register_hook", _register_hook),
        ("register_post_accumulate_grad_hook", _register_post_accumulate_grad_hook),
    ):
        shard.__dict__[name] = _weakly_bound(method, shard)


def _weakly_bound(method: Callable, shard: nn.Parameter) -> Callable[[Callable], Any]:
    # A bound method would be a cycle: the shard's memory would wait for the garbage collector.
    reference = weakref.ref(shard)

    def register(hook: Callable) -> Any:
        held = reference()
        assert held is not None, "was called through it"
        return method(held, hook)

    return register


def _register_hook(shard: nn.Parameter, hook: Callable[[torch.Tensor], Any]) -> Any:
    """As ``Tensor.register_hook``."""
    return torch.Tensor.register_hook(shard, lambda grad: None if grad is None else hook(grad))


def _register_post_accumulate_grad_hook(
    shard: nn.Parameter, hook: Callable[[torch.Tensor], None]
) -> Any:
    """As ``Tensor.register_post_accumulate_grad_hook``."""
    came = [False]

    def note(grad: torch.Tensor | None) -> None:
        came[0] = grad is not None

    def after(parameter: torch.Tensor) -> None:
        return hook(parameter) if came[0] else None

    torch.Tensor.register_hook(shard, note)
    return torch.Tensor.register_post_accumulate_grad_hook(shard, after)


def accumulate(shard: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds ``grad`` to that of ``shard`` as autograd would, hooks included."""
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
