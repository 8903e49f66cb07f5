"""Adapts and checks the optimizers and data loaders that a strategy receives."""

from __future__ import annotations

from typing import Any

import torch

from ...ranks.rank import current_rank
from ...sharding.optimizer_hook import has_shards
from ..early_optimizers import switch_to_shards


def adopt(optimizer: torch.optim.Optimizer) -> None:
    """Replaces the parameters of ``optimizer`` by shards if it was created before the wrapping.

    Raises:
        ValueError: it has no parameter of a wrapped model, or has made steps already.
    """
    switch_to_shards(optimizer)
    if not has_shards(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} has no parameter of a model that was set up. Create "
            "it with the parameters of the model that is trained"
        )


def require_no_forks(loader: Any) -> None:
    """Raises ValueError if workers of ``loader`` would be forked from ranks that are threads."""
    if current_rank() is None or not getattr(loader, "num_workers", 0):
        return
    context = getattr(loader, "multiprocessing_context", None)
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if method in (None, "fork"):
        raise ValueError(
            f"num_workers={loader.num_workers} would fork this process, which has CPU ranks as "
            "threads. Pass multiprocessing_context='forkserver' to the DataLoader, or num_workers=0"
        )
