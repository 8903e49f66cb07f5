"""``nn.Linear`` on inputs of three and more dimensions, without flattening them.

PyTorch computes it as a product of matrices: the leading dimensions become one, and the gradient of
the weight contracts over it. XLA lays tensors out freely, (batch, sequence, width) often with the
sequence last, but a reshape forces the plain order on it: a copy of every activation. Contracting
over all leading dimensions at once leaves the compiler its choice. Workload S on v5e:2x4: 46.5 to
39.4 million cycles, and 93 MiB less of temporaries (benchmarks/LOG.md).
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.backends
from torch import nn
from torch.autograd import forward_ad

from ..collectives.order import after
from ..collectives.world import World

# Kinds of chips. Workload S on v6e-8: 20.7 instead of 23.3 million cycles, recomputed 26 instead of
# 29, for 195 MiB more. On v5e nothing is gained.
KEEPING = ("TPU v6 lite",)
# Elements of a weight from which on :func:`frees_input` holds.
LARGE = 1 << 21
# Dimensions of both factors and of the product: a letter each, a star for all leading ones.
Equation = tuple[str, str, str]
_FORWARD: Equation = ("*n", "mn", "*m")


class _Product(torch.autograd.Function):
    """``apply(x, y, equation, frees)``: a contraction, differentiable any number of times.

    ``frees``: the backward computes the gradient of ``x`` only once that of ``y`` is there, which
    is the last to read ``x``.
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
            grads[1] = _Product.apply(grad, x, (of_grad, of_x, of_y))
        if ctx.needs_input_grad[0]:
            if ctx.frees and grads[1] is not None:
                (grad,) = after([grad], [grads[1]])
            grads[0] = _Product.apply(grad, y, (of_grad, of_y, of_x))
        return tuple(grads)


def _contracted(x: torch.Tensor, y: torch.Tensor, equation: Equation) -> torch.Tensor:
    """The sum over what ``x`` and ``y`` share. Not ``einsum``, which costs the host four times as
    much in every step."""
    of_x, of_y, output = equation
    if output[0] not in of_x:  # what is left of the first factor comes first
        x, of_x, y, of_y = y, of_y, x, of_x
    (shared,) = set(of_x) & set(of_y)
    contracting = _dims(x, of_x, shared), _dims(y, of_y, shared)
    return torch_xla._XLAC._xla_dot_general(x, y, (contracting, ([], [])), None)


def _dims(tensor: torch.Tensor, letters: str, letter: str) -> list[int]:
    """Which dimensions of ``tensor`` a letter stands for."""
    if letter == "*":
        return list(range(tensor.dim() - 1))
    return [tensor.dim() - len(letters) + letters.index(letter)]


class _Kept(torch.autograd.Function):
    """``apply(x)``: ``x``, which the compiler may not compute again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kept = torch.view_copy(x, x.shape)
        torch_xla._XLAC._xla_optimization_barrier_([kept])
        return kept

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def contracted(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear`` of ``input`` (..., n), ``weight`` (m, n) and ``bias`` (m,): (..., m), without
    flattening ``input``.

    What ``nn.Linear`` inside a wrapper does by itself, for parts of a weight: queries, keys and
    values made one by one of a fused weight need no copy of their gradients into one tensor.
    Workload S on v5litepod-8: 38.5 to 37.3 million cycles (docs/benchmarks.md).
    """
    if not _contracts(input, weight):
        return F.linear(input, weight, bias)
    y = _Product.apply(input, weight, _FORWARD, False)
    return y if bias is None else y + bias


def linear(
    module: nn.Linear, input: torch.Tensor, keep: bool = False, frees: bool = False
) -> torch.Tensor:
    """What ``module`` computes of ``input`` ``(..., n)``: ``(..., m)``.

    ``keep``: with ``input`` in memory until the backward, if there will be one. ``frees``: and not
    after the backward of this layer.
    """
    weight = module.weight
    if _contracts(input, weight):
        # The gradient of a frozen weight, which reads the input once more, is not computed.
        if keep and torch.is_grad_enabled() and weight.requires_grad:
            input = _Kept.apply(input)
        y = _Product.apply(input, weight, _FORWARD, frees)
        return y if module.bias is None else y + module.bias
    return F.linear(input, weight, module.bias)


def _contracts(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        input.dim() > 2
        and input.is_xla  # type: ignore[attr-defined]  # not in torch's stubs
        and input.dtype == weight.dtype
        and input.shape[-1] == weight.shape[1]  # else it is for PyTorch to say what is wrong
        and not torch.is_autocast_enabled("xla")
        # torch_xla's contraction would ignore it.
        and torch_xla.backends.get_mat_mul_precision() == "default"
        and forward_ad._current_level < 0
    )


def applies_to(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether ``module`` computes what :func:`linear` does, and not something of its own.

    Parametrized weights (LoRA, spectral norm) are computed anew whenever they are looked at.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" in module._parameters
    )


def keeps_input(module: nn.Linear, world: World) -> bool:
    """Whether what goes into ``module`` is better kept for the backward than computed again.

    What a layer narrows is the result of an activation function. The compiler likes to compute that
    again, inside of each product that reads it. The chip's product of matrices is so fast in
    relation to its other arithmetic (:data:`KEEPING`) that the products wait for it.
    """
    return world.device_kind in KEEPING and _narrows(module)


def frees_input(module: nn.Linear) -> bool:
    """Whether, in a loop over blocks, the gradient of the weight should come first.

    The compiler puts off gradients of weights, which nothing waits for, and what they are made of
    stays: an MLP's activations during the attention's backward. 32 scanned blocks of workload S on
    v3-8: 975 MiB instead of 1,047. Small layers lose by the barrier (benchmarks/LOG.md).
    """
    return _narrows(module) and module.in_features * module.out_features >= LARGE


def _narrows(module: nn.Linear) -> bool:
    return module.out_features < module.in_features


def replace_forward(module: nn.Linear, keep: bool = False, frees: bool = False) -> None:
    """Has ``module`` compute with :func:`linear` until :func:`restore_forward`.

    Unless somebody else replaced its forward.
    """
    module.__dict__.setdefault("forward", _Contraction(module, keep, frees))


def restore_forward(module: nn.Linear) -> None:
    """Undoes :func:`replace_forward`."""
    if isinstance(module.__dict__.get("forward"), _Contraction):
        del module.__dict__["forward"]


class _Contraction:
    """The forward of a module, while it is replaced."""

    def __init__(self, module: nn.Linear, keep: bool, frees: bool) -> None:
        self.module = module
        self.keep, self.frees = keep, frees

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return linear(self.module, input, self.keep, self.frees)
