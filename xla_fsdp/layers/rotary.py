"""Rotary position embedding that leaves the halves of a head where they are.

The usual way cuts each head in two and joins the halves the other way round: copies, in whose
layout every register of a TPU is filled to a quarter or a half. As a product with a matrix of 0, 1
and -1 it costs 1 or 2 thousandths of a block's FLOPs, and no copy. Su et al., "RoFormer", arXiv
2104.09864; halves as in GPT-NeoX and LLaMA.
"""

from __future__ import annotations

import torch

# Narrow enough for the matrix unit to take them as they are: the product is exact.
_EXACT = (torch.bfloat16, torch.float16)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x * cos + turned * sin``; ``turned`` has the second half of ``x``, negated, then the first.

    On XLA in bfloat16 and float16 halves change places by a product, with the same values (where
    one of a head is not finite, all of that head's become NaN); otherwise they are cut and joined.

    Args:
        x: (..., length, head dimension), the latter even.
        cos, sin: of the angles, as many for both halves; must broadcast to ``x``, e.g. (length,
            head dimension).

    Raises:
        ValueError: the head dimension is odd.
    """
    dim = x.shape[-1]
    if dim % 2:
        raise ValueError(f"the head dimension must be even to have halves, got {tuple(x.shape)}")
    if not x.is_xla or x.dtype not in _EXACT:  # type: ignore[attr-defined]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
    one = torch.eye(dim // 2, dtype=x.dtype, device="cpu")
    none = torch.zeros_like(one)
    turn = torch.cat([torch.cat([none, one], 1), torch.cat([-one, none], 1)])
    return x * cos + (x @ turn.to(x.device)) * sin
