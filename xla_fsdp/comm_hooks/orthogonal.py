"""Orthonormal bases of what the columns of a matrix span."""

from __future__ import annotations

import torch

# What is left of a column when the others are taken out of it is rounding, if it is less than this
# part of it: the column says nothing new.
_DEPENDENT = 1e-5


def orthonormal_columns(p: torch.Tensor) -> torch.Tensor:
    """Columns of length 1 at right angles, or of zeros, that span those of ``p``, ``(n, r)``.

    Modified Gram-Schmidt, a column after the other, in sums and products that all ranks round
    alike. No matrix products, which a TPU computes in bfloat16.
    """
    # The length of a small or large column would be zero or infinite.
    largest = p.abs().amax(dim=0, keepdim=True)
    rest = p / torch.where(largest > 0, largest, torch.ones_like(largest))
    lengths = rest.square().sum(0, keepdim=True).sqrt()
    found = []
    for number in range(p.shape[1]):
        column, whole = rest[:, :1], lengths[:, number : number + 1]
        length = column.square().sum(0, keepdim=True).sqrt()
        # A comparison with NaN is false: what is infinite stays so, instead of becoming zero.
        dependent = length <= _DEPENDENT * whole
        unit = torch.where(dependent, torch.zeros_like(column), column / length)
        found.append(unit)
        rest = rest[:, 1:]
        rest = rest - unit * (unit * rest).sum(0, keepdim=True)
    return torch.cat(found, dim=1)
