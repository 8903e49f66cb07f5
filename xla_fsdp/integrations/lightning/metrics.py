"""Metrics of torchmetrics over all ranks; torchmetrics itself only supports torch.distributed."""

from __future__ import annotations

import torch
import torch_xla.runtime as xr
from torch import nn
from torchmetrics import Metric

from .collectives import gather_states
from .ranks import in_rank


def sync_metrics(module: nn.Module, device: torch.device) -> None:
    """Moves the metrics in ``module`` to ``device`` and makes them compute over all ranks.

    Metrics for which the user has set another synchronization are not changed.
    """
    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)
            if each.dist_sync_fn is None:
                each.dist_sync_fn = gather_states
                each.distributed_available_fn = several_ranks


def several_ranks() -> bool:
    return in_rank() and xr.world_size() > 1
