"""Loss scaling for float16: all ranks skip a step together."""

from __future__ import annotations

import torch
import torch_xla
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from .collectives.host_data import as_data
from .collectives.world import World


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` on gradients that exist in shards.

    The step is skipped, and the scale lowered, on every rank if there is an infinity or NaN in the
    shard of any. Used as torch's: ``scaler.scale(loss).backward()``, perhaps
    ``scaler.unscale_(optimizer)`` and ``model.clip_grad_norm_(...)``, then
    ``scaler.step(optimizer)`` and ``scaler.update()``, on all ranks. ``step`` reads one number from
    the device, so that a step is two programs; bfloat16 needs no scaler. ``torch.amp.GradScaler``
    does the same for shards; this one also asks about ignored parameters, and about ranks in
    replicas.

    Args:
        init_scale: the first factor.
        growth_factor: what it is multiplied by after ``growth_interval`` good steps in a row.
        backoff_factor: what it is multiplied by after a step that was skipped.
        growth_interval: see above.
        enabled: ``False``: do nothing.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("xla", init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = torch_xla.device()
        # A rank may have no gradient at all, and still takes part.
        own = found.get(device, torch.zeros((), device=device))
        cpu = torch.device("cpu")
        if cpu in found:  # with cpu_offload
            own = torch.maximum(own, as_data(found[cpu], device))
        world = World.to_reduce_over(None, device)
        return {device: world.all_reduce_max(own, "found infinity")}
