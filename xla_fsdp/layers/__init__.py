"""Modules that know of sharding, and functions that compute without what would not fit."""

from .attention import scaled_dot_product_attention
from .cross_entropy import linear_cross_entropy
from .heads import FromHeads, ToHeads

__all__ = ["FromHeads", "ToHeads", "linear_cross_entropy", "scaled_dot_product_attention"]
