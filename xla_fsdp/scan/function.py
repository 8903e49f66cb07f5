"""One call of scanned blocks as autograd sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .run import Run


class Scan(torch.autograd.Function):
    """``apply(run, x, number_of_constants, *constants, *stacked shards)``."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, x: torch.Tensor, number: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        y, *kept = run.forward(x, run.unit.sources)
        if kept:
            ctx.run, ctx.number, ctx.kept = run, number, len(kept)
            # Not the shards: torch forgets the hooks on a leaf that a custom function saves while
            # saved tensors have hooks, as they have within a wrapper.
            ctx.save_for_backward(*kept, *tensors[:number])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.run.require_shards_unchanged()
        kept, constants = ctx.saved_tensors[: ctx.kept], ctx.saved_tensors[ctx.kept :]
        needs, number = ctx.needs_input_grad[3:], ctx.number
        of_x, of_constants, of_stacks = ctx.run.backward(
            grad,
            kept,
            ctx.run.unit.sources,
            constants,
            (needs[:number], needs[number:]),
        )
        # What autograd saved may be other objects with the same values.
        of_stacks = ctx.run.unit.gradients.given(ctx.run.unit.shards, of_stacks)
        return None, of_x, None, *of_constants, *of_stacks
