"""What may run before what: the only place that emits optimization barriers.

XLA is free to hoist a gather to the start of the program (all parameters in memory at once) and to
merge the gather of the forward with that of the backward (parameters kept in between). A barrier
that ties the shards to a tensor prevents both: nothing behind it starts before that tensor exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla


def after(
    tensors: Sequence[torch.Tensor],
    events: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]] | None = None,
) -> list[torch.Tensor]:
    """Copies of ``tensors`` that exist only once all ``events`` do; the arguments stay as they are.

    ``shapes``: what to view the copies as. A barrier replaces what it is given. Applied to a
    parameter itself it would make the parameter an output of every step, so it is applied to
    copies; the compiler removes those.
    """
    shapes = shapes or [tensor.shape for tensor in tensors]
    tied = [torch.view_copy(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]
    if tied and events:
        torch_xla._XLAC._xla_optimization_barrier_(
            tied + [torch.view_copy(event, event.shape) for event in events]
        )
    return tied
