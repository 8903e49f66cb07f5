"""``nn.Linear`` on inputs of three and more dimensions, without flattening them.

PyTorch makes the leading dimensions one, and the gradient of the weight contracts over it; here
(``contraction.py``) over all leading dimensions at once. Workload S on v5e:2x4: 46.5 to 39.4
million cycles, and 93 MiB less of temporaries (benchmarks/LOG.md).
"""

from __future__ import annotations

import contextlib
import string
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from ..collectives.order import kept
from ..collectives.world import World
from ..tpu.chips import chip_of
from .contraction import Product, contracts

# Elements of a weight from which on :func:`frees_input` holds.
LARGE = 1 << 21


# What transformers, and others, call the layers of attention, and the size of a head.
_MAKE_HEADS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v")
_TAKE_HEADS = ("o_proj", "out_proj", "dense", "o", "out")
_SIZES = ("head_dim", "attention_head_size")


@dataclass(frozen=True)
class Heads:
    """A layer of attention whose outputs, or else inputs, are heads of ``size`` elements, side by
    side. What makes them views of heads comes after the layer, or before it: said in the product,
    it costs no copy (docs/how-to/attention.md)."""

    size: int
    made: bool

    def fit(self, weight: torch.Tensor) -> bool:
        """Whether a ``weight`` (m, n) makes, or takes, whole heads."""
        return weight.shape[0 if self.made else 1] % self.size == 0


def linear(
    module: nn.Linear,
    input: torch.Tensor,
    keep: bool = False,
    frees: bool = False,
    heads: Heads | None = None,
) -> torch.Tensor:
    """What ``module`` computes of ``input`` ``(..., n)``: ``(..., m)``.

    ``keep``: with ``input`` in memory until the backward, if there will be one. ``frees``: and not
    after the backward of this layer. ``heads``: what the last dimension of one of them is.
    """
    weight, bias = module.weight, module.bias
    # A wrong width is for PyTorch to tell.
    if input.dim() > 2 and contracts(input, weight) and input.shape[-1] == weight.shape[1]:
        # The gradient of a frozen weight, which reads the input once more, is not computed. A
        # parameter is gathered again instead.
        own = input if input._base is None else input._base
        keep = keep and not isinstance(own, nn.Parameter)
        if keep and torch.is_grad_enabled() and weight.requires_grad:
            input = kept(input)
        leading = string.ascii_lowercase[: input.dim() - 1]
        made, taken = "M", "N"
        if heads is not None and heads.fit(weight):
            parts = (-1, heads.size)
            if heads.made:
                made, weight = "HM", weight.unflatten(0, parts)
                bias = None if bias is None else bias.unflatten(0, parts)
            else:
                taken, weight, input = "HN", weight.unflatten(1, parts), input.unflatten(-1, parts)
        y = Product.apply(input, weight, (leading + taken, made + taken, leading + made), frees)
        y = y if bias is None else y + bias
        return y.flatten(-2) if made == "HM" else y
    return F.linear(input, weight, bias)


# Layers that compute so, and what is known of each.
Layers = dict[nn.Linear, Heads | None]


def layers_in(modules: Iterable[nn.Module]) -> Layers:
    """Those of ``modules`` that :func:`linear` may compute, and what it is to know of each."""
    modules = list(modules)
    found: Layers = {m: None for m in modules if applies_to(m)}
    for parent in modules:
        size = next((vars(parent)[name] for name in _SIZES if name in vars(parent)), None)
        if type(size) is not int or size < 1:
            continue
        for name in (*_MAKE_HEADS, *_TAKE_HEADS):
            layer = parent._modules.get(name)
            if isinstance(layer, nn.Linear) and layer in found:
                found[layer] = Heads(size, made=name in _MAKE_HEADS)
    return found


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
    relation to its other arithmetic (``Chip.stores_linear_inputs``) that the products wait for it.
    """
    chip = chip_of(world.device_kind)
    return chip is not None and chip.stores_linear_inputs and _narrows(module)


def frees_input(module: nn.Linear) -> bool:
    """Whether, where a block is recomputed, the gradient of the weight should come first.

    The compiler puts off gradients of weights, which nothing waits for, and what they are made of
    stays: an MLP's activations during the attention's backward. 32 scanned blocks of workload S on
    v3-8: 975 MiB instead of 1,047. Outside of loops it does so with what :func:`keeps_input` keeps
    only: four checkpointed blocks on v5p-128, 586 MiB instead of 650, and no gain on v3, v4 and
    v5e. Small layers lose by the barrier (benchmarks/LOG.md).
    """
    return _narrows(module) and module.in_features * module.out_features >= LARGE


def _narrows(module: nn.Linear) -> bool:
    return module.out_features < module.in_features


_recomputed: ContextVar[bool] = ContextVar("xla_fsdp_recomputed", default=False)


@contextlib.contextmanager
def recomputed_later() -> Iterator[None]:
    """Within, what this thread computes is computed again by the backward, not kept for it."""
    token = _recomputed.set(True)
    try:
        yield
    finally:
        _recomputed.reset(token)


def replace_forwards(layers: Layers, world: World, in_loop: bool = False) -> None:
    """Has ``layers`` compute with :func:`linear` until :func:`restore_forwards`, but those of which
    somebody else replaced the forward. ``in_loop``: over blocks, which recomputes each."""
    for module, heads in layers.items():
        keep, frees = keeps_input(module, world), in_loop and frees_input(module)
        module.__dict__.setdefault("forward", _Contraction(module, keep, frees, heads))


def restore_forwards(layers: Layers) -> None:
    """Undoes :func:`replace_forwards`."""
    for module in layers:
        if isinstance(module.__dict__.get("forward"), _Contraction):
            del module.__dict__["forward"]


class _Contraction:
    """The forward of a module, while it is replaced."""

    def __init__(self, module: nn.Linear, keep: bool, frees: bool, heads: Heads | None) -> None:
        self.module = module
        self.keep, self.frees, self.heads = keep, frees, heads

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        frees = self.frees or (self.keep and _recomputed.get() and frees_input(self.module))
        return linear(self.module, input, self.keep, frees, self.heads)
