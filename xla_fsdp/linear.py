"""``nn.Linear`` on inputs of three and more dimensions, without flattening them.

PyTorch computes it as a product of matrices: the leading dimensions become one, and the gradient of
the weight contracts over it. XLA lays tensors out freely, (batch, sequence, width) often with the
sequence last, but a reshape forces the plain order on it: a copy of every activation. Contracting
over all leading dimensions at once leaves the compiler its choice. Workload S on v5e:2x4: 46.5 to
39.4 million cycles, and 93 MiB less of temporaries (benchmarks/LOG.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_xla.backends
from torch import nn
from torch.autograd import forward_ad

from .world import World

_FORWARD = "...n,mn->...m"
_GRAD_OF_INPUT = "...m,mn->...n"
_GRAD_OF_WEIGHT = "...m,...n->mn"


class _Product(torch.autograd.Function):
    """``apply(x, y, equation)``: a contraction, differentiable any number of times."""

    @staticmethod
    def forward(ctx, x, y, equation):
        ctx.save_for_backward(x, y)
        ctx.equation = equation
        return torch.einsum(_spelled(equation, x, y), x, y)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        inputs, output = ctx.equation.split("->")
        of_x, of_y = inputs.split(",")
        grads = [None, None, None]
        if ctx.needs_input_grad[0]:
            grads[0] = _Product.apply(grad, y, f"{output},{of_y}->{of_x}")
        if ctx.needs_input_grad[1]:
            grads[1] = _Product.apply(grad, x, f"{output},{of_x}->{of_y}")
        return tuple(grads)


def _spelled(equation: str, x: torch.Tensor, y: torch.Tensor) -> str:
    """``equation`` with letters instead of the dots, so that it may sum over those dimensions."""
    inputs = equation.split("->")[0].split(",")
    number = max(
        tensor.dim() - len(one.replace("...", ""))
        for one, tensor in zip(inputs, (x, y), strict=True)
        if "..." in one
    )
    return equation.replace("...", "abcdefghijkl"[:number])


def linear(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """What ``module`` computes of ``input`` ``(..., n)``: ``(..., m)``."""
    weight = module.weight
    if _contracts(input, weight):
        y = _Product.apply(input, weight, _FORWARD)
        return y if module.bias is None else y + module.bias
    return F.linear(input, weight, module.bias)


def _contracts(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        input.dim() > 2
        and input.is_xla
        and input.dtype == weight.dtype
        and input.shape[-1] == weight.shape[1]  # else it is for PyTorch to say what is wrong
        and not torch.is_autocast_enabled("xla")
        # torch_xla's contraction would ignore it.
        and torch_xla.backends.get_mat_mul_precision() == "default"
        and forward_ad._current_level < 0
    )


def pays_on(world: World) -> bool:
    """Whether contracting is worth it: XLA on a CPU flattens again, with copies."""
    return world.context is None


def applies_to(module: nn.Module) -> bool:
    """Whether ``module`` computes what :func:`linear` does, and not something of its own.

    Parametrized weights (LoRA, spectral norm) are computed anew whenever they are looked at.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" in module._parameters
    )


def replace_forward(module: nn.Linear) -> None:
    """Has ``module`` compute with :func:`linear` until :func:`restore_forward`.

    Unless somebody else replaced its forward.
    """
    module.__dict__.setdefault("forward", _Contraction(module))


def restore_forward(module: nn.Linear) -> None:
    """Undoes :func:`replace_forward`."""
    if isinstance(module.__dict__.get("forward"), _Contraction):
        del module.__dict__["forward"]


class _Contraction:
    """The forward of a module, while it is replaced."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return linear(self.module, input)
