"""``nn.Linear`` on inputs of three and more dimensions, without flattening them.

PyTorch flattens the leading dimensions into one, and contracts over it for the gradient of the
weight; this module contracts over all leading dimensions in one operation (``contraction.py``).
Workload S on v5e:2x4: 46.5 to 39.4 million cycles, and 93 MiB less of temporaries
(benchmarks/LOG.md).
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

from ..collectives.order import prevent_recomputation
from ..collectives.world import World
from ..tpu.chips import chip_of
from .contraction import Product, contracts

# From this many elements of a weight on, :func:`frees_input` applies.
LARGE = 1 << 21


# Names of the layers of attention in transformers and other libraries.
_MAKE_HEADS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v")
_TAKE_HEADS = ("o_proj", "out_proj", "dense", "o", "out")
_SIZES = ("head_dim", "attention_head_size")


@dataclass(frozen=True)
class Heads:
    """Marks a linear layer of attention whose outputs (or inputs) are heads of ``size`` elements
    each. The views that split or join heads come after (or before) the layer. Inside the
    contraction they need no copy (docs/how-to/attention.md)."""

    size: int
    made: bool

    def fit(self, weight: torch.Tensor) -> bool:
        """Whether the rows (or columns) of a ``weight`` (m, n) are complete heads."""
        return weight.shape[0 if self.made else 1] % self.size == 0


def linear(
    module: nn.Linear,
    input: torch.Tensor,
    keep: bool = False,
    frees: bool = False,
    heads: Heads | None = None,
) -> torch.Tensor:
    """The result of ``module`` for ``input`` ``(..., n)``: ``(..., m)``.

    ``keep``: if there will be a backward, store ``input`` until then. ``frees``: free it after this
    layer's backward. ``heads``: the heads in the last dimension of the input or output.
    """
    weight, bias = module.weight, module.bias
    # PyTorch raises the error for a wrong width.
    if input.dim() > 2 and contracts(input, weight) and input.shape[-1] == weight.shape[1]:
        # The gradient of a frozen weight, which would need the input again, is not computed. A
        # parameter is not stored but gathered again.
        own = input if input._base is None else input._base
        keep = keep and not isinstance(own, nn.Parameter)
        if keep and torch.is_grad_enabled() and weight.requires_grad:
            input = prevent_recomputation(input)
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


# The linear layers of a module that are computed here, with the heads of each.
Layers = dict[nn.Linear, Heads | None]


def layers_in(modules: Iterable[nn.Module]) -> Layers:
    """The ``modules`` that :func:`linear` can compute, with the heads of each."""
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
    """Whether the forward of ``module`` is that of ``nn.Linear``, and can be replaced.

    Not for parametrized weights (LoRA, spectral norm), which are computed again at every access.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" in module._parameters
    )


def stores_input(module: nn.Linear, world: World) -> bool:
    """Whether storing the input of ``module`` until the backward is faster than recomputing it.

    The input of a layer that reduces the width is the result of an activation function. The
    compiler tends to recompute that inside each matmul that reads it. On some chips, matmuls are so
    fast relative to other arithmetic (``Chip.stores_linear_inputs``) that they wait for it.
    """
    chip = chip_of(world.device_kind)
    return chip is not None and chip.stores_linear_inputs and _narrows(module)


def frees_input(module: nn.Linear) -> bool:
    """Whether, in a recomputed block, the gradient of the weight should be computed first.

    The compiler delays gradients of weights, because no other operation waits for them, so their
    inputs stay in memory: an MLP's activations during the attention's backward. 32 scanned blocks
    of workload S on v3-8: 975 MiB instead of 1,047. Outside of loops this happens only to inputs
    that :func:`stores_input` stores: four checkpointed blocks on v5p-128, 586 MiB instead of 650,
    and no gain on v3, v4 and v5e. For small layers the barrier costs more (benchmarks/LOG.md).
    """
    return _narrows(module) and module.in_features * module.out_features >= LARGE


def _narrows(module: nn.Linear) -> bool:
    return module.out_features < module.in_features


_recomputed: ContextVar[bool] = ContextVar("xla_fsdp_recomputed", default=False)


@contextlib.contextmanager
def recomputed_later() -> Iterator[None]:
    """Within, the backward recomputes what this thread computes, instead of storing it."""
    token = _recomputed.set(True)
    try:
        yield
    finally:
        _recomputed.reset(token)


def replace_forwards(layers: Layers, world: World, in_loop: bool = False) -> None:
    """Makes ``layers`` compute with :func:`linear` until :func:`restore_forwards`, except those
    whose forward other code replaced. ``in_loop``: in scanned blocks, which recompute each."""
    for module, heads in layers.items():
        keep, frees = stores_input(module, world), in_loop and frees_input(module)
        module.__dict__.setdefault("forward", _Contraction(module, keep, frees, heads))


def restore_forwards(layers: Layers) -> None:
    """Undoes :func:`replace_forwards`."""
    for module in layers:
        if isinstance(module.__dict__.get("forward"), _Contraction):
            del module.__dict__["forward"]


class _Contraction:
    """The forward of a module while it is replaced."""

    def __init__(self, module: nn.Linear, keep: bool, frees: bool, heads: Heads | None) -> None:
        self.module = module
        self.keep, self.frees, self.heads = keep, frees, heads

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        frees = self.frees or (self.keep and _recomputed.get() and frees_input(self.module))
        return linear(self.module, input, self.keep, frees, self.heads)
