"""Modules that know of sharding, and functions that compute without what would not fit."""

from .attention import scaled_dot_product_attention
from .cross_entropy import linear_cross_entropy
from .linear import contracted

__all__ = ["contracted", "linear_cross_entropy", "scaled_dot_product_attention"]
