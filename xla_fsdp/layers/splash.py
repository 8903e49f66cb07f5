"""Attention that never writes out its scores: JAX's splash attention, forward and backward.

The kernels are JAX's own (``jax.experimental.pallas.ops.tpu.splash_attention``, version 0.7.1),
after Dao et al., "FlashAttention", arXiv 2205.14135. Blocks of the scores that a causal mask hides
are left out; heads of queries share heads of keys and values without copies of those.

Shapes: b batch, h heads of queries, g heads of keys and values (g divides h), s length of queries,
t length of keys and values, d head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .jax_call import Cost

# The kernels' unit of lengths, which is also how wide the core's vector registers are.
LANES = 128
# Blocks of queries and of keys, 512 as in MaxText's configurations.
_LARGEST_BLOCK = 512
_SUBLANES = 8
_FLOAT = 4  # bytes


def block_of(length: int) -> int | None:
    """The largest block that divides ``length``; ``None`` if no block does."""
    sizes = range(_LARGEST_BLOCK, 0, -LANES)
    return next((size for size in sizes if length % size == 0), None)


@dataclass(frozen=True)
class Splash:
    """What the kernels depend on, besides shapes and dtypes.

    Attributes:
        is_causal: position i of the queries sees positions up to i of the keys.
        scale: what scores are multiplied with.
        interpret: compute block by block on any device, instead of by a kernel.
        matrix_unit: rows of a matrix unit of the chip; decides on the stated cost only.
        itemsize: bytes of an element of queries, keys and values.
    """

    is_causal: bool
    scale: float
    interpret: bool
    matrix_unit: int
    itemsize: int

    def kernel(self, heads: int, queries: int, keys: int, residuals: bool) -> Any:
        """The kernels for one sequence."""
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel,
            splash_attention_mask,
        )

        kind = "CausalMask" if self.is_causal else "FullMask"
        mask = getattr(splash_attention_mask, kind)((queries, keys))
        q, kv = block_of(queries), block_of(keys)
        assert q is not None and kv is not None, (queries, keys)
        sizes = splash_attention_kernel.BlockSizes(
            block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv
        )
        return splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            save_residuals=residuals,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )

    def segments(self, ids: Sequence[Any]) -> Any:
        """``ids`` of queries and of keys, or none, as the kernels take them."""
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        return SegmentIds(q=ids[0], kv=ids[0]) if ids else None

    def work(self, shapes: Sequence[tuple[int, ...]]) -> _Work:
        """What the kernels go through for arguments of ``shapes``."""
        (b, h, s, d), (_, g, t, _) = shapes[:2]
        q, kv = block_of(s), block_of(t)
        assert q is not None and kv is not None, (s, t)
        rows, columns = range(s // q), range(t // kv)
        visited = sum(not self.is_causal or j * kv < (i + 1) * q for i in rows for j in columns)
        pairs = sum(min(i + 1, t) for i in range(s)) if self.is_causal else s * t
        unit = self.matrix_unit
        return _Work(
            heads=b * h,
            groups=b * g,
            queries=s,
            keys=t,
            row=math.ceil(d / LANES) * LANES * self.itemsize,
            block_q=q,
            block_kv=kv,
            visited=visited,
            model=2 * b * h * pairs * d,
            executed=2 * b * h * visited * q * kv * (math.ceil(d / unit) * unit),
        )


@dataclass(frozen=True)
class _Work:
    """What one pass over the scores takes.

    ``heads`` and ``groups`` are those of queries and of keys, times the batch. ``visited`` counts
    blocks of one head. ``model`` and ``executed`` are FLOPs of one product with the scores: as the
    mathematics asks, and with the hidden part of visited blocks and a head dimension that fills the
    rows of a matrix unit. ``row`` is bytes of one position of one head, which fills registers.
    """

    heads: int
    groups: int
    queries: int
    keys: int
    row: int
    block_q: int
    block_kv: int
    visited: int
    model: int
    executed: int

    def cost(self, products: int, counted: int, bytes_: int) -> Cost:
        """``products`` with the scores, of which ``counted`` count for the model."""
        exponentials = self.heads * self.visited * self.block_q * self.block_kv
        return Cost(products * self.executed, bytes_, exponentials, counted * self.model)

    def by_queries(self, read: int, written: int) -> int:
        """Bytes of a kernel that holds a block of queries while it goes through keys and values:
        ``read`` and ``written`` for each query, and keys and values once for every block."""
        streamed = self.heads * self.visited * self.block_kv * 2 * self.row
        return self.heads * self.queries * (read + written) + streamed

    def by_keys(self, read: int) -> int:
        """Bytes of a kernel that holds a block of keys while it goes through queries: ``read`` for
        each query of a visited block; keys and values are read for every head of queries and their
        gradients written."""
        streamed = self.heads * self.visited * self.block_q * read
        return streamed + (self.heads + self.groups) * self.keys * 2 * self.row


@dataclass(frozen=True)
class Forward:
    """(q (b, h, s, d), k and v (b, g, t, d), segment ids (b, s) or nothing) to the output
    (b, h, s, d) and, with ``residuals``, the logarithm of the sum of exponentials of the scores
    (b, h, s), float32."""

    splash: Splash
    residuals: bool
    name: str = "splash_attention"

    def __call__(self, q: Any, k: Any, v: Any, *segments: Any) -> tuple[Any, ...]:
        import jax

        kernel = self.splash.kernel(q.shape[1], q.shape[2], k.shape[2], self.residuals)

        def one(q: Any, k: Any, v: Any, *ids: Any) -> Any:
            return kernel(q * self.splash.scale, k, v, self.splash.segments(ids))

        result = jax.vmap(one)(q, k, v, *segments)
        return (result[0], result[1][0]) if self.residuals else (result,)

    def costs(self, shapes: Sequence[tuple[int, ...]]) -> Mapping[str, Cost]:
        work = self.splash.work(shapes)
        written = work.row + (LANES * _FLOAT if self.residuals else 0)
        return {"splash_mha_fwd": work.cost(2, 2, work.by_queries(work.row, written))}


@dataclass(frozen=True)
class Backward:
    """(q, k, v, output, logarithm, gradient of the output, segment ids or nothing) to the gradients
    of q, k and v. Model FLOPs: four products, twice the forward's; the scores again do not count.
    """

    splash: Splash
    name: str = "splash_attention_backward"

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, grad: Any, *segments: Any
    ) -> tuple[Any, ...]:
        import jax
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        kernel = self.splash.kernel(q.shape[1], q.shape[2], k.shape[2], residuals=False)
        backward: Any = splash_attention_kernel._splash_attention_bwd
        scale = self.splash.scale

        def one(q: Any, k: Any, v: Any, out: Any, total: Any, grad: Any, *ids: Any) -> Any:
            kept = (
                q * scale, k, v, self.splash.segments(ids), None, out, total,
                kernel.dq_mask_info, kernel.dkv_mask_info,
            )  # fmt: skip
            settings: list[Any] = [
                kernel.kwargs[name]
                for name in (
                    "save_residuals", "mask_value", "is_mqa", "block_sizes",
                    "residual_checkpoint_name", "mask_function", "attn_logits_soft_cap",
                    "interpret",
                )
            ]  # fmt: skip
            grads = backward(*settings, kept, grad)
            return grads[3] * scale, grads[4], grads[5]

        of_q, of_k, of_v = jax.vmap(one)(q, k, v, out, logsumexp, grad, *segments)
        return of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype)

    def costs(self, shapes: Sequence[tuple[int, ...]]) -> Mapping[str, Cost]:
        work = self.splash.work(shapes)
        read = 2 * work.row
        return {
            # Scores, their gradient, and a product with each for those of values and keys.
            "splash_mha_dkv": work.cost(4, 3, work.by_keys(read + 2 * _SUBLANES * _FLOAT)),
            # Scores, their gradient, and the product that makes the gradient of queries.
            "splash_mha_dq": work.cost(3, 1, work.by_queries(read + 2 * _FLOAT, work.row)),
        }
