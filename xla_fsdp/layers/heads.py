"""``nn.Linear`` into and out of heads, without a copy of the activations between.

Attention wants (batch, heads, length, head dimension). Made of (batch, length, heads x dimension),
as a linear layer returns it, that is a copy: no layout of the one is the order of the other. A
product whose result has heads and dimension apart can be laid out as attention wants it by the
compiler. In JAX: ``einsum("bsn,hdn->bhsd")``.

Shapes: b batch, s length, h heads, d head dimension, n and m features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.backends
from torch import nn
from torch.autograd.function import once_differentiable


class ToHeads(nn.Linear):
    """An ``nn.Linear`` that returns (b, h, s, d) for (b, s, n); h d = ``out_features``.

    Parameters, their names, shapes and beginnings are those of ``nn.Linear``.

    Raises:
        ValueError: ``heads`` does not divide ``out_features``.
    """

    def __init__(self, in_features: int, out_features: int, heads: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.heads = _divisor(heads, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _by_contraction(x, self.weight):
            y = F.linear(x, self.weight, self.bias)
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = _ToHeads.apply(x, self.weight.unflatten(0, (self.heads, -1)))
        if self.bias is not None:
            y = y + self.bias.unflatten(0, (self.heads, -1))
        return y.transpose(1, 2)


class FromHeads(nn.Linear):
    """An ``nn.Linear`` that takes (b, h, s, d) and returns (b, s, m); h d = ``in_features``.

    Parameters, their names, shapes and beginnings are those of ``nn.Linear``.

    Raises:
        ValueError: ``heads`` does not divide ``in_features``.
    """

    def __init__(self, in_features: int, out_features: int, heads: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.heads = _divisor(heads, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _by_contraction(x, self.weight):
            return F.linear(x.transpose(1, 2).flatten(2), self.weight, self.bias)
        y = _FromHeads.apply(x, self.weight.unflatten(1, (self.heads, -1)))
        return y if self.bias is None else y + self.bias


class _ToHeads(torch.autograd.Function):
    """(b, s, n) and (h, d, n) to (b, s, h, d)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, [2], [2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            _product(grad, weight, [2, 3], [0, 1]) if of_x else None,
            _product(grad, x, [0, 1], [0, 1]) if of_weight else None,
        )


class _FromHeads(torch.autograd.Function):
    """(b, h, s, d) and (m, h, d) to (b, s, m)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, [1, 3], [1, 2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (  # (b, s, h, d) turned; (m, h, d)
            _product(grad, weight, [2], [0]).transpose(1, 2) if of_x else None,
            _product(grad, x, [0, 1], [0, 2]) if of_weight else None,
        )


def _product(x: torch.Tensor, y: torch.Tensor, of_x: list[int], of_y: list[int]) -> torch.Tensor:
    """The sum over dimensions ``of_x`` and ``of_y``; what is left of ``x`` comes first."""
    return torch_xla._XLAC._xla_dot_general(x, y, ((of_x, of_y), ([], [])), None)


def _by_contraction(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.is_xla  # type: ignore[attr-defined]  # not in torch's stubs
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled("xla")
        # torch_xla's contraction would ignore it.
        and torch_xla.backends.get_mat_mul_precision() == "default"
    )


def _divisor(heads: int, features: int) -> int:
    if heads < 1 or features % heads:
        raise ValueError(f"heads must divide {features} features, got {heads}")
    return heads
