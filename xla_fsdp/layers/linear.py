"""``nn.Linear`` and ``einsum`` as contractions over the original dimensions.

PyTorch flattens dimensions, which makes XLA copy every activation to the plain layout. Workload S
on v5e:2x4: 46.5 to 39.4 million cycles, and 93 MiB less of temporaries (benchmarks/LOG.md).
"""

from __future__ import annotations

import contextlib
import string
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.backends
from torch import nn
from torch.autograd import forward_ad

from .. import xlac
from ..collectives.order import after, prevent_recomputation
from ..collectives.world import World
from ..tpu.chips import chip_of

# Dimensions of the factors and of the result, one letter each.
Equation = tuple[str, str, str]


def einsum(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``torch.einsum`` of two factors, without flattening or transposing them on a TPU.

    For example, with ``x`` (b, s, w) and a weight (h, d, w), ``einsum("bsw,hdw->bhsd", x, weight)``
    gives the queries of all heads as attention's matmuls read them.

    Calls ``torch.einsum`` for other equations (a letter twice in one factor, or in one factor only
    and not in the result; an ellipsis; no result given), for factors of two dtypes, under autocast,
    and for tensors that are not on XLA.

    Args:
        equation: such as ``"bqhd,bkhd->bhqk"``.

    Raises:
        ValueError: the equation does not match the factors.
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
        # The contraction would ignore another precision.
        and torch_xla.backends.get_mat_mul_precision() == "default"
        and forward_ad._current_level < 0
    )


def _letters(equation: str, x: torch.Tensor, y: torch.Tensor) -> Equation | None:
    """The letters of ``equation``, if it is a supported contraction and fits ``x`` and ``y``."""
    factors, arrow, output = equation.replace(" ", "").partition("->")
    of_x, comma, of_y = factors.partition(",")
    each = of_x, of_y, output
    joined = "".join(each)
    repeats = any(len(set(letters)) < len(letters) for letters in each)
    if not (arrow and comma and set(joined) <= set(string.ascii_letters)) or repeats:
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
    alone = any(joined.count(letter) == 1 for letter in joined)
    return None if broadcast or alone else each


class Product(torch.autograd.Function):
    """``apply(x, y, equation, frees)``: a contraction, differentiable any number of times.

    ``frees``: the backward computes the gradient of ``x`` after that of ``y``, the last reader of
    ``x``.
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
    """``torch.einsum`` would take four times as much host time in every step."""
    of_x, of_y, output = equation
    batch = [letter for letter in of_x if letter in of_y and letter in output]
    rest = [letter for letter in output if letter not in batch]
    if rest and rest[0] not in of_x:
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


# Elements of a weight for :func:`frees_input`.
LARGE = 1 << 21

# Layers of attention in transformers and other libraries.
_MAKE_HEADS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v")
_TAKE_HEADS = ("o_proj", "out_proj", "dense", "o", "out")
_SIZES = ("head_dim", "attention_head_size")


@dataclass(frozen=True)
class Heads:
    """Marks a linear layer with heads as outputs (``made``) or inputs: docs/how-to/attention.md."""

    size: int
    made: bool


Layers = dict[nn.Linear, Heads | None]


def layers_in(modules: Iterable[nn.Module]) -> Layers:
    """Those of ``modules`` with the forward of ``nn.Linear``, and the heads of each.

    Without parametrized weights (LoRA, spectral norm), which are computed at every access.
    """
    modules = list(modules)
    found: Layers = {
        module: None
        for module in modules
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" in module._parameters
    }
    for parent in modules:
        size = next((vars(parent)[name] for name in _SIZES if name in vars(parent)), None)
        if type(size) is not int or size < 1:
            continue
        for name in (*_MAKE_HEADS, *_TAKE_HEADS):
            layer = parent._modules.get(name)
            if isinstance(layer, nn.Linear) and layer in found:
                found[layer] = Heads(size, made=name in _MAKE_HEADS)
    return found


def stores_input(module: nn.Linear, world: World) -> bool:
    """Whether storing the input of ``module`` is faster than recomputing it.

    The compiler tends to recompute the activation function inside each matmul that reads it.
    """
    chip = chip_of(world.device_kind)
    return chip is not None and chip.stores_linear_inputs and _narrows(module)


def frees_input(module: nn.Linear) -> bool:
    """Whether, in a recomputed block, the gradient of the weight should be computed first.

    The compiler delays gradients of weights, so their inputs stay in memory (32 scanned blocks of
    workload S on v3-8: 1,047 MiB instead of 975). Outside of loops this affects only stored inputs.
    For small layers the barrier costs more (benchmarks/LOG.md).
    """
    return _narrows(module) and module.in_features * module.out_features >= LARGE


def _narrows(module: nn.Linear) -> bool:
    return module.out_features < module.in_features


_recomputed: ContextVar[bool] = ContextVar("xla_fsdp_recomputed", default=False)


@contextlib.contextmanager
def recomputed_later() -> Iterator[None]:
    """Within, the backward recomputes what this thread computes."""
    token = _recomputed.set(True)
    try:
        yield
    finally:
        _recomputed.reset(token)


def replace_forwards(layers: Layers, world: World, in_loop: bool = False) -> None:
    """Replaces the layers' forwards, except replaced ones. ``in_loop``: in scanned blocks."""
    for module, heads in layers.items():
        keep, frees = stores_input(module, world), in_loop and frees_input(module)
        module.__dict__.setdefault("forward", _Contraction(module, keep, frees, heads))


def restore_forwards(layers: Layers) -> None:
    for module in layers:
        if isinstance(module.__dict__.get("forward"), _Contraction):
            del module.__dict__["forward"]


class _Contraction:
    """``keep``: store the input until the backward. ``frees``: free it after this layer's."""

    def __init__(self, module: nn.Linear, keep: bool, frees: bool, heads: Heads | None) -> None:
        self.module = module
        self.keep, self.frees, self.heads = keep, frees, heads

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias, heads = self.module.weight, self.module.bias, self.heads
        # PyTorch raises the error for a wrong width.
        supported = input.dim() > 2 and contracts(input, weight)
        if not supported or input.shape[-1] != weight.shape[1]:
            return F.linear(input, weight, bias)
        # Only the gradient of the weight reads the input. A parameter is gathered again instead.
        own = input if input._base is None else input._base
        keep = self.keep and not isinstance(own, nn.Parameter)
        if keep and torch.is_grad_enabled() and weight.requires_grad:
            input = prevent_recomputation(input)
        frees = self.frees or (self.keep and _recomputed.get() and frees_input(self.module))
        leading = string.ascii_lowercase[: input.dim() - 1]
        made, taken = "M", "N"
        if heads is not None and weight.shape[0 if heads.made else 1] % heads.size == 0:
            parts = (-1, heads.size)
            if heads.made:
                made, weight = "HM", weight.unflatten(0, parts)
                bias = None if bias is None else bias.unflatten(0, parts)
            else:
                taken, weight, input = "HN", weight.unflatten(1, parts), input.unflatten(-1, parts)
        y = Product.apply(input, weight, (leading + taken, made + taken, leading + made), frees)
        y = y if bias is None else y + bias
        return y.flatten(-2) if made == "HM" else y
