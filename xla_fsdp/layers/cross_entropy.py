"""The cross entropy of a linear layer's outputs, without storing all of these outputs.

A loop computes the logits of one chunk of the vocabulary at a time (Milakov and Gimelshein, arXiv
1805.02867). Shapes: t tokens, n width, m size of the vocabulary, c of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
from torch.autograd.function import once_differentiable

from ..compiler_options import require_loops_compile
from .jax_call import Settings, call

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk: int = 8192,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight).float(), labels)`` with one chunk of logits at a
    time.

    The backward computes the logits again. Matmuls accumulate in float32. Gradients of gradients
    are not supported. Call it in the forward of the module whose wrapper shards ``weight``, or of a
    module inside.

    Args:
        hidden: (..., n), on an XLA device (on others all logits are computed together).
        weight: (m, n), in the dtype of ``hidden``.
        labels: (...), integers from 0 to m - 1, or ``ignore_index``. For other labels the loss and
            its gradients are NaN.
        chunk: c, how many logits of a token are in memory at a time.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.

    Returns:
        The loss, at least in float32.

    Raises:
        ValueError: shapes or dtypes do not match; an argument is out of its range.
        MissingExtraError: jax, in which the loop is written, is not installed.
        RuntimeError: on v5e and v6e, an option is set with which the compiler crashes on loops.
    """
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (..., n) and weight (m, n), got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}. A sharded weight is full only in its wrapper's forward"
        )
    if labels.shape != hidden.shape[:-1] or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers of shape {tuple(hidden.shape[:-1])}, got {labels.dtype} of "
            f"shape {tuple(labels.shape)}"
        )
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk must be a positive integer, got {chunk!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if not hidden.is_xla:  # type: ignore[attr-defined]
        logits = F.linear(hidden, weight).flatten(0, -2)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(
            logits, labels.flatten(), None,
            ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip
        return losses.view(labels.shape) if reduction == "none" else losses
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, but both must be float32 or both "
            "bfloat16. Cast one (hidden.to(weight.dtype))"
        )
    require_loops_compile(xm.xla_device_kind(hidden.device))
    platform = "tpu" if xm.xla_device_hw(hidden.device) == "TPU" else "cpu"
    settings = _Settings(min(chunk, weight.shape[0]), ignore_index, label_smoothing, platform)
    if labels.dtype is torch.int64:  # labels beyond 32 bits would wrap
        labels = labels.clamp(-(2**31), 2**31 - 1)
    flat = labels.flatten().to(torch.int32)
    losses = _LinearCrossEntropy.apply(settings, hidden.flatten(0, -2), weight, flat)
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: _Settings,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        losses, total = call(linear_cross_entropy_losses, settings, [hidden, weight, labels])
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, labels, total)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = [*ctx.saved_tensors, grad.float()]
        of_hidden, of_weight = call(linear_cross_entropy_gradients, ctx.settings, tensors)
        return None, of_hidden, of_weight, None


@dataclass(frozen=True)
class _Settings(Settings):
    chunk: int
    ignore_index: int
    label_smoothing: float
    platform: str

    def counted(self, labels: Any, values: Any, vocabulary: int) -> Any:
        """0 for tokens that do not count, NaN for labels out of range, else ``values``."""
        import jax.numpy as jnp

        known = jnp.where((labels >= 0) & (labels < vocabulary), values, jnp.nan)
        return jnp.where(labels == self.ignore_index, 0, known)

    def over_chunks(self, step: Any, carry: Any, vocabulary: int) -> Any:
        import jax

        whole = vocabulary // self.chunk
        carry = jax.lax.fori_loop(
            0, whole, lambda i, carry: step(carry, i * self.chunk, self.chunk), carry
        )
        rest = vocabulary - whole * self.chunk
        return step(carry, whole * self.chunk, rest) if rest else carry


def _chunk_of(hidden: Any, weight: Any, labels: Any, first: Any, rows: int) -> tuple[Any, Any, Any]:
    """Rows of the weight (c, n), logits (t, c) in float32, and which are of the label (t, c)."""
    import jax
    import jax.numpy as jnp

    part = jax.lax.dynamic_slice_in_dim(weight, first, rows)
    logits = jnp.einsum("tn,cn->tc", hidden, part, preferred_element_type=jnp.float32)
    return part, logits, (labels - first)[:, None] == jnp.arange(rows)


def linear_cross_entropy_losses(
    settings: _Settings, hidden: Any, weight: Any, labels: Any
) -> tuple[Any, ...]:
    """hidden (t, n), weight (m, n), labels (t,) to losses and logsumexp, (t,), float32."""
    import jax.numpy as jnp

    (tokens, _), (vocabulary, _) = hidden.shape, weight.shape
    smooth = settings.label_smoothing

    def step(carry: Any, first: Any, rows: int) -> Any:
        largest, total, of_label, everything = carry
        _, logits, is_label = _chunk_of(hidden, weight, labels, first, rows)
        now = jnp.maximum(largest, logits.max(1))
        total = total * jnp.exp(largest - now) + jnp.exp(logits - now[:, None]).sum(1)
        of_label = of_label + jnp.where(is_label, logits, 0).sum(1)
        if smooth:
            everything = everything + logits.sum(1)
        return now, total, of_label, everything

    zeros = jnp.zeros(tokens, jnp.float32)
    start = jnp.full(tokens, -jnp.inf, jnp.float32), zeros, zeros, zeros
    largest, total, of_label, everything = settings.over_chunks(step, start, vocabulary)
    logsumexp = largest + jnp.log(total)
    losses = logsumexp - (1 - smooth) * of_label - smooth / vocabulary * everything
    return settings.counted(labels, losses, vocabulary), logsumexp


def linear_cross_entropy_gradients(
    settings: _Settings, hidden: Any, weight: Any, labels: Any, logsumexp: Any, grad: Any
) -> tuple[Any, ...]:
    """The gradients of hidden and weight; ``grad``: of the losses."""
    import jax
    import jax.numpy as jnp

    vocabulary, smooth = weight.shape[0], settings.label_smoothing
    grad = settings.counted(labels, grad, vocabulary)[:, None]

    def step(carry: Any, first: Any, rows: int) -> Any:
        of_hidden, of_weight = carry
        part, logits, is_label = _chunk_of(hidden, weight, labels, first, rows)
        wanted = jnp.where(is_label, 1 - smooth, 0) + smooth / vocabulary
        of_logits = (grad * (jnp.exp(logits - logsumexp[:, None]) - wanted)).astype(part.dtype)
        wide = {"preferred_element_type": jnp.float32}
        of_hidden = of_hidden + jnp.einsum("tc,cn->tn", of_logits, part, **wide)
        of_part = jnp.einsum("tc,tn->cn", of_logits, hidden, **wide).astype(part.dtype)
        return of_hidden, jax.lax.dynamic_update_slice_in_dim(of_weight, of_part, first, 0)

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(weight.shape, weight.dtype)
    of_hidden, of_weight = settings.over_chunks(step, start, vocabulary)
    return of_hidden.astype(hidden.dtype), of_weight
