"""Contractions of tensors over any of their dimensions, in the form that the TPU compiler supports.

PyTorch computes ``nn.Linear`` and ``torch.einsum`` as matmuls: it flattens the dimensions that are
not contracted, and copies tensors that must be transposed for that. XLA chooses the layout of
tensors freely, for (batch, sequence, width) often with the sequence last, but a reshape requires
the plain layout: a copy of every activation. A contraction over the original dimensions leaves
the choice to XLA.
"""

from __future__ import annotations

import string
from typing import Any

import torch
import torch_xla
import torch_xla.backends
from torch.autograd import forward_ad

from .. import xlac
from ..collectives.order import after

# The dimensions of both factors and of the result: one letter each.
Equation = tuple[str, str, str]


def einsum(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``torch.einsum`` of two factors, without flattening or transposing them on a TPU.

    For example, attention heads in the layout in which they are used: with ``x`` (b, s, w) and a
    weight (h, d, w), ``einsum("bsw,hdw->bhsd", x, weight)`` gives the queries of all heads, and
    both matmuls of attention can read them directly. docs/design/benchmarks.md compares this with
    ``nn.Linear`` and views on workload S.

    All other cases call ``torch.einsum``: an equation that is not such a contraction (a letter
    twice in one factor, or in one factor only and not in the result; an ellipsis; no result given),
    factors of two dtypes, autocast, and tensors that are not on XLA.

    Args:
        equation: such as ``"bqhd,bkhd->bhqk"``.

    Raises:
        ValueError: the equation does not match the factors (torch_xla's einsum does not check it).
    """
    letters = _letters(equation, x, y)
    if letters is None or not contracts(x, y):
        return torch.einsum(equation, x, y)
    return Product.apply(x, y, letters)


def contracts(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether ``Product`` supports these tensors with the same result as torch."""
    return (
        x.is_xla  # type: ignore[attr-defined]  # not in torch's stubs
        and y.is_xla  # type: ignore[attr-defined]
        and x.dtype == y.dtype
        and x.dtype.is_floating_point
        and not torch.is_autocast_enabled("xla")
        # torch_xla's contraction would ignore another precision.
        and torch_xla.backends.get_mat_mul_precision() == "default"
        and forward_ad._current_level < 0
    )


def _letters(equation: str, x: torch.Tensor, y: torch.Tensor) -> Equation | None:
    """The letters of ``equation``, if it is a supported contraction and fits ``x`` and ``y``."""
    factors, arrow, output = equation.replace(" ", "").partition("->")
    of_x, comma, of_y = factors.partition(",")
    each = of_x, of_y, output
    if not (arrow and comma and all(_once(letters) for letters in each)):
        return None
    what = f"einsum({equation!r}) of factors of {tuple(x.shape)} and {tuple(y.shape)}"
    if (x.dim(), y.dim()) != (len(of_x), len(of_y)):
        raise ValueError(f"{what}: each needs one letter for each of its dimensions")
    of_second = dict(zip(of_y, y.shape, strict=True))
    broadcast = False
    for letter, size in zip(of_x, x.shape, strict=True):
        other = of_second.get(letter, size)
        if size != other and 1 not in (size, other):
            raise ValueError(f"{what}: {letter!r} has two sizes, which must be equal")
        broadcast |= size != other
    return None if broadcast or any(_alone(letters, each) for letters in each) else each


def _once(letters: str) -> bool:
    return len(set(letters)) == len(letters) and set(letters) <= set(string.ascii_letters)


def _alone(letters: str, each: Equation) -> bool:
    """Whether one of ``letters`` occurs only once in ``each``."""
    return any(sum(letter in other for other in each) < 2 for letter in letters)


class Product(torch.autograd.Function):
    """``apply(x, y, equation, frees)``: a contraction, differentiable any number of times.

    ``frees``: the backward computes the gradient of ``x`` only after that of ``y``, which is the
    last operation that reads ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, equation: Equation, frees: bool = False
    ) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        ctx.equation, ctx.frees = equation, frees
        return _contracted(x, y, equation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = ctx.saved_tensors
        of_x, of_y, of_grad = ctx.equation
        grads: list[torch.Tensor | None] = [None, None, None, None]
        if ctx.needs_input_grad[1]:
            grads[1] = Product.apply(grad, x, (of_grad, of_x, of_y))
        if ctx.needs_input_grad[0]:
            if ctx.frees and grads[1] is not None:
                (grad,) = after([grad], [grads[1]])
            grads[0] = Product.apply(grad, y, (of_grad, of_y, of_x))
        return tuple(grads)


def _contracted(x: torch.Tensor, y: torch.Tensor, equation: Equation) -> torch.Tensor:
    """The sum over the dimensions that ``x`` and ``y`` share and the result lacks. Not
    ``torch.einsum``, which takes four times as much host time in every step."""
    of_x, of_y, output = equation
    batch = [letter for letter in of_x if letter in of_y and letter in output]
    rest = [letter for letter in output if letter not in batch]
    if rest and rest[0] not in of_x:  # the remaining dimensions of the first factor come first
        x, of_x, y, of_y = y, of_y, x, of_x
    shared = [letter for letter in of_x if letter in of_y and letter not in output]
    contracting = _dims(of_x, shared), _dims(of_y, shared)
    batched = _dims(of_x, batch), _dims(of_y, batch)
    product = xlac.dot_general(x, y, (contracting, batched), None)
    made = [*batch, *(letter for letter in of_x + of_y if letter in rest)]
    if made == list(output):
        return product
    return product.permute([made.index(letter) for letter in output])


def _dims(letters: str, some: list[str]) -> list[int]:
    return [letters.index(letter) for letter in some]
