"""Scaled dot-product attention: JAX's splash attention (0.7.1) on TPU, torch's elsewhere.

Dao et al., "FlashAttention", arXiv 2205.14135. Shapes: b batch, h query heads, g key/value heads (g
divides h), s length of queries, t length of keys and values, d head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.autograd.function import once_differentiable

from ..tpu.chips import HEAD_DIM, LANES, LARGEST_HEAD_DIM, SUBLANES, Chip, chip_of
from .jax_call import Cost, Settings, call
from .saved_activations import ATTENTION, current_saved_activations

Implementation = Literal["auto", "kernel", "math"]
_torch_attention = F.scaled_dot_product_attention
_KERNEL_DTYPES = (torch.bfloat16, torch.float32)

# As in MaxText's configurations.
_LARGEST_BLOCK = 512
_FLOAT = 4  # bytes


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    segment_ids: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, without full scores in TPU memory.

    On a TPU, and in a plan for one, a Pallas kernel with memory proportional to the length.
    Gradients of gradients are not supported.

    Args:
        query: (batch, heads, length, head dimension).
        key, value: (batch, key heads, key length, head dimension).
        attn_mask, is_causal, scale, enable_gqa: as in torch.
        dropout_p: must be 0.
        segment_ids: (batch, length), integers: positions attend only to positions with the same
            number. Query and key must have the same length.
        implementation: ``"auto"``: the kernel, but torch's off TPUs; on v2 and v3; for an
            ``attn_mask``; for dtypes other than bfloat16 and float32; for head dimensions that are
            not a multiple of 64 up to 256, or that differ between keys and values; for lengths that
            are not a multiple of 128; in SPMD mode; and for float32 with a matmul precision other
            than the default. ``"math"``: torch's. ``"kernel"``: the kernel, interpreted slowly off
            TPUs.

    Returns:
        (batch, heads, length, head dimension), in the dtype of ``query`` or of autocast.

    Raises:
        MissingExtraError: the kernel is needed, but jax is not installed.
        ValueError: ``dropout_p`` is not 0; shapes do not match; ``segment_ids`` or ``is_causal`` is
            combined with ``attn_mask``; ``implementation="kernel"`` is not supported here.
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p} is not supported; it must be 0. Apply dropout to the output, "
            "or call torch.nn.functional.scaled_dot_product_attention"
        )
    if misfit := misfit_of(query, key, value, enable_gqa):
        raise ValueError(misfit)
    if attn_mask is not None and (is_causal or segment_ids is not None):
        raise ValueError(
            "attn_mask cannot be combined with is_causal or segment_ids. Put everything into the "
            "mask, or leave it out"
        )
    if segment_ids is not None:
        _check_segments(segment_ids, query, key)
    if implementation not in ("auto", "kernel", "math"):
        raise ValueError(
            f"implementation must be 'auto', 'kernel' or 'math', got {implementation!r}"
        )
    if query.is_xla and torch.is_autocast_enabled("xla"):  # type: ignore[attr-defined]
        dtype = torch.get_autocast_dtype("xla")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if implementation != "math":
        reason = _why_not(query, key, value, attn_mask)
        if implementation == "kernel" and reason:
            raise ValueError(
                f"implementation='kernel' is not supported here: {reason}. Change that, or pass "
                "implementation='auto' or 'math'"
            )
        if not reason and (implementation == "kernel" or _on_tpu(query.device)):
            scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
            return _kernel(query, key, value, is_causal, scale, segment_ids)
    if segment_ids is not None:
        attn_mask = segment_mask(segment_ids, is_causal)
        is_causal = False
    out = _torch_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    kept = current_saved_activations(ATTENTION)
    return out if kept is None else kept.of_tensor(ATTENTION, out)


def segment_mask(segment_ids: torch.Tensor, is_causal: bool) -> torch.Tensor:
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return mask.tril() if is_causal else mask


def _check_segments(segment_ids: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    (batch, _, length, _), keys = query.shape, key.shape[2]
    if tuple(segment_ids.shape) != (batch, length) or segment_ids.is_floating_point():
        raise ValueError(
            f"segment_ids must be (batch, length) = {(batch, length)}, integers, got "
            f"{tuple(segment_ids.shape)}, {segment_ids.dtype}"
        )
    if length != keys:
        raise ValueError(
            "segment_ids need queries and keys of the same length, got "
            f"{length} and {keys}. Use attn_mask instead"
        )


def misfit_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> str:
    """Why these shapes are not supported here, or ""; torch also broadcasts others."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        return f"tensors must be (batch, heads, length, head dimension), got {shapes}"
    heads, groups = query.shape[1], key.shape[1]
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0]:
        return (
            "key and value must have the same batch, heads and length, and query the same batch, "
            f"got {shapes}"
        )
    if query.shape[3] != key.shape[3]:
        return f"query and key must have the same head dimension, got {shapes}"
    if heads != groups and not (enable_gqa and groups and heads % groups == 0):
        return (
            f"{heads} query heads and {groups} key heads are not supported: they must be equal or, "
            "with enable_gqa=True, key heads must divide query heads"
        )
    return ""


def _why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> str:
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    dim = query.shape[3]
    if not query.is_xla:  # type: ignore[attr-defined]
        return f"tensors are on {query.device}, not on an XLA device"
    if attn_mask is not None:
        return "attn_mask was passed, but the kernel supports only is_causal and segment_ids"
    if len(dtypes) > 1 or not dtypes <= set(_KERNEL_DTYPES):
        names = ", ".join(sorted(map(str, dtypes)))
        return f"dtypes are {names}, but the kernel supports all bfloat16 or all float32"
    if dim % HEAD_DIM or dim > LARGEST_HEAD_DIM or value.shape[3] != dim:
        return (
            f"head dimensions are {dim} and {value.shape[3]} (of values), but the kernel supports "
            f"equal multiples of {HEAD_DIM} up to {LARGEST_HEAD_DIM}"
        )
    if not query.numel() or not key.numel():
        return "a tensor is empty"
    if not block_of(query.shape[2]) or not block_of(key.shape[2]):
        return (
            f"lengths are {query.shape[2]} and {key.shape[2]} (of keys), but the kernel supports "
            f"multiples of {LANES}"
        )
    if (chip := _chip(query.device)) and not chip.attention_kernel:
        return f"the kernel cannot be compiled for this chip, a {chip.device_kind}"
    if xr.is_spmd():
        return "this is SPMD mode, in which the compiler cannot partition a kernel"
    if query.dtype == torch.float32 and torch_xla.backends.get_mat_mul_precision() != "default":
        return "a matmul precision was set, which the kernel ignores"
    return ""


def _on_tpu(device: torch.device) -> bool:
    return xm.xla_device_hw(device) == "TPU"


def _chip(device: torch.device) -> Chip | None:
    return chip_of(xm.xla_device_kind(device))


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
    segment_ids: torch.Tensor | None,
) -> torch.Tensor:
    chip = _chip(query.device)
    splash = Splash(
        is_causal=is_causal,
        scale=scale,
        platform="tpu" if _on_tpu(query.device) else "cpu",
        matrix_unit=chip.matrix_unit if chip else LANES,
        itemsize=query.element_size(),
    )
    segments = [] if segment_ids is None else [segment_ids.to(query.device, torch.int32)]
    tensors = [query, key, value]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Attention.apply(splash, query, key, value, *segments)
    if current_saved_activations(ATTENTION):
        return _with_residuals(splash, [*tensors, *segments])[0]
    return call(splash_attention, splash, [*tensors, *segments])[0]


def _with_residuals(splash: Splash, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Where both are reused, neither is computed again."""

    def compute() -> Sequence[torch.Tensor]:
        return call(splash_attention, replace(splash, residuals=True), tensors)

    kept = current_saved_activations(ATTENTION)
    return compute() if kept is None else kept.computed(ATTENTION, compute, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, splash: Splash, *tensors: torch.Tensor) -> torch.Tensor:
        out, logsumexp = _with_residuals(splash, tensors)
        ctx.splash = splash
        ctx.save_for_backward(*tensors[:3], out, logsumexp, *tensors[3:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, logsumexp, *segments = ctx.saved_tensors
        tensors = [q, k, v, out, logsumexp, grad.to(out.dtype), *segments]
        grads = call(splash_attention_backward, ctx.splash, tensors)
        return None, *grads, *(None for _ in segments)


def block_of(length: int) -> int | None:
    sizes = range(_LARGEST_BLOCK, 0, -LANES)
    return next((size for size in sizes if length % size == 0), None)


@dataclass(frozen=True)
class Splash(Settings):
    """Parameters of the kernels, which are interpreted on "cpu".

    ``matrix_unit``: rows of the chip's, for the stated cost. ``itemsize``: bytes of an element.
    ``residuals``: also return the logsumexp of the scores (b, h, s), float32.
    """

    is_causal: bool
    scale: float
    platform: str
    matrix_unit: int
    itemsize: int
    residuals: bool = False

    def kernel(self, heads: int, queries: int, keys: int) -> Any:
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
            save_residuals=self.residuals,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.platform == "cpu",
        )

    def segments(self, ids: Sequence[Any]) -> Any:
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        return SegmentIds(q=ids[0], kv=ids[0]) if ids else None

    def costs(self, shapes: Sequence[tuple[int, ...]]) -> Mapping[str, Cost]:
        """Model FLOPs of a backward are four matmuls; recomputed scores do not count."""
        (b, h, s, d), (_, g, t, _) = shapes[:2]
        block_q, block_kv = block_of(s), block_of(t)
        assert block_q is not None and block_kv is not None, (s, t)
        rows, columns = range(s // block_q), range(t // block_kv)
        # Blocks of one head, and elements of scores in those of all heads.
        visited = sum(
            not self.is_causal or j * block_kv < (i + 1) * block_q for i in rows for j in columns
        )
        scores = b * h * visited * block_q * block_kv
        pairs = sum(min(i + 1, t) for i in range(s)) if self.is_causal else s * t
        padded = math.ceil(d / self.matrix_unit) * self.matrix_unit
        # Bytes of one position of one head, padded to registers.
        row = math.ceil(d / LANES) * LANES * self.itemsize

        def cost(matmuls: int, counted: int, bytes_: int) -> Cost:
            """Executed FLOPs include masked and padded parts; model FLOPs do not."""
            return Cost(
                matmuls * 2 * scores * padded, bytes_, scores, counted * 2 * b * h * pairs * d
            )

        def by_queries(read: int, written: int) -> int:
            """Bytes of a kernel that loops over keys and values for each block of queries."""
            return b * h * (s * (read + written) + visited * block_kv * 2 * row)

        written = row + (LANES * _FLOAT if self.residuals else 0)
        # Bytes of a kernel that loops over queries for each block of keys.
        read_by_keys = b * h * visited * block_q * (2 * row + 2 * SUBLANES * _FLOAT)
        by_keys = read_by_keys + (h + g) * b * t * 2 * row
        return {
            "splash_mha_fwd": cost(2, 2, by_queries(row, written)),
            # Scores, their gradient, gradients of values and keys.
            "splash_mha_dkv": cost(4, 3, by_keys),
            # Scores, their gradient, gradient of queries.
            "splash_mha_dq": cost(3, 1, by_queries(2 * row + 2 * _FLOAT, row)),
        }


def splash_attention(splash: Splash, q: Any, k: Any, v: Any, *segments: Any) -> tuple[Any, ...]:
    """q (b, h, s, d), k and v (b, g, t, d), segment ids (b, s) or nothing to the output, (b, h, s,
    d).
    """
    import jax

    kernel = splash.kernel(q.shape[1], q.shape[2], k.shape[2])

    def one(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return kernel(q * splash.scale, k, v, splash.segments(ids))

    result = jax.vmap(one)(q, k, v, *segments)
    return (result[0], result[1][0]) if splash.residuals else (result,)


def splash_attention_backward(
    splash: Splash, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, grad: Any, *segments: Any
) -> tuple[Any, ...]:
    """The gradients of q, k and v."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    kernel = splash.kernel(q.shape[1], q.shape[2], k.shape[2])
    backward: Any = splash_attention_kernel._splash_attention_bwd
    scale = splash.scale

    def one(q: Any, k: Any, v: Any, out: Any, total: Any, grad: Any, *ids: Any) -> Any:
        kept = (
            q * scale, k, v, splash.segments(ids), None, out, total,
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
