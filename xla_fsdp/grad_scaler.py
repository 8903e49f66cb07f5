"""Loss scaling for float16: all ranks skip a step together."""

from __future__ import annotations

import torch
import torch_xla
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from .collectives.host_data import as_data
from .collectives.world import World


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` for gradients that are sharded, on all ranks.

    If any rank's shard contains infinity or NaN, every rank skips the step. Unlike
    ``torch.amp.GradScaler``, which works on shards too, it checks ignored parameters and all
    replicas. ``step`` reads one number from the device, so a step is two programs.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in
            ``torch.amp.GradScaler``.
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
        # A rank without any gradient still takes part in the reduction.
        own = found.get(device, torch.zeros((), device=device))
        cpu = torch.device("cpu")
        if cpu in found:
            own = torch.maximum(own, as_data(found[cpu], device))
        world = World.to_reduce_over(None, device)
        return {device: world.all_reduce_max(own, "found infinity")}
