"""Modules and functions that know of ranks, shards or kernels."""

from .attention import scaled_dot_product_attention
from .cross_entropy import linear_cross_entropy
from .gathering import all_gather_with_grad
from .linear import einsum
from .softmax import softmax

__all__ = [
    "all_gather_with_grad",
    "einsum",
    "linear_cross_entropy",
    "scaled_dot_product_attention",
    "softmax",
]
