"""Averaging the gradients of ignored parameters, which no wrapper reduces."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .ignored import note_of
from .unit import Unit


@torch.no_grad()
def average_ignored_gradients(units: Iterable[Unit]) -> None:
    """Gives the parameters that ``units`` ignore the mean of their gradients over the ranks.

    One all-reduce for each unit that ignores something and each dtype; narrow gradients are summed
    in float32. All ranks must call it, and must have gradients for the same parameters; one without
    gradient stays so.
    """
    done: set[nn.Parameter] = set()
    for unit in units:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in unit.ignored:
            note = note_of(parameter)
            if note is not None:
                note.averaged = True
            if parameter.grad is not None and parameter not in done:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
            done.add(parameter)
        divisor = unit.wire.predivide * unit.wire.postdivide
        for dtype, grads in by_dtype.items():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            flat = flat.float() if dtype in (torch.float16, torch.bfloat16) else flat
            total = unit.world.all_reduce_sum(flat, "ignored gradients")
            mean = unit.world.sum_over_replicas(total, "ignored gradients") / divisor
            pieces = mean.to(dtype).split([grad.numel() for grad in grads])
            for grad, piece in zip(grads, pieces, strict=True):
                grad.copy_(piece.view(grad.shape))
