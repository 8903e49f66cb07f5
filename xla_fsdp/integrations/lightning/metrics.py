"""Metrics of torchmetrics among ranks; they know of torch.distributed only."""

from __future__ import annotations

import torch
import torch_xla.runtime as xr
from torch import nn
from torchmetrics import Metric

from .collectives import gather_states
from .ranks import in_rank


def sync_metrics(module: nn.Module, device: torch.device) -> None:
    """Has the metrics in ``module`` be on ``device`` and compute over all ranks, where nobody has
    said otherwise."""
    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)
            if each.dist_sync_fn is None:
                each.dist_sync_fn = gather_states
                each.distributed_available_fn = several_ranks


def several_ranks() -> bool:
    return in_rank() and xr.world_size() > 1
