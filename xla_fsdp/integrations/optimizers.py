"""Optimizers that were created before their model was sharded, and several in one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn

from ..checkpoint.loading import load_checkpoint
from ..checkpoint.rank_exchange import RankExchange
from ..checkpoint.saving import save_checkpoint
from ..consolidate.format.folders import list_folders
from ..consolidate.format.store import open_store
from ..sharding.ignored import ignored_mark_of
from ..sharding.sharded_tensor import sharded_tensor_of


def switch_to_shards(optimizer: torch.optim.Optimizer) -> None:
    """Replaces the parameters of ``optimizer`` by their shards, in the same groups. Raises
    ValueError if it has made steps, or parameters of several groups are in one flat vector."""
    groups_of: dict[nn.Parameter, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        shards: dict[nn.Parameter, None] = {}
        for parameter in group["params"]:
            sharded = sharded_tensor_of(parameter)
            shard = parameter if sharded is None else sharded.shard
            if shard is not parameter and optimizer.state.get(parameter):
                raise ValueError(
                    f"this {type(optimizer).__name__} has made steps before its model was sharded, "
                    "and its state belongs to unsharded parameters: prepare the model before the "
                    "first step, and load the state with xla_fsdp.load_full_optim_state_dict"
                )
            if groups_of.setdefault(shard, number) != number:
                raise ValueError(
                    f"parameters of groups {groups_of[shard]} and {number} of this "
                    f"{type(optimizer).__name__} are in one vector because of flatten_parameters: "
                    "leave that option out, or use one group"
                )
            shards[shard] = None
        group["params"] = list(shards)


def average_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Averages the gradients of replicated parameters over all ranks, which must all call it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for note in filter(None, map(ignored_mark_of, parameters)):
        note.averaged = True
    gradients = [p.grad for p in parameters if sharded_tensor_of(p) is None and p.grad is not None]
    if gradients and xr.world_size() > 1:
        xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1.0 / xr.world_size())


class JoinedOptimizers(torch.optim.Optimizer):
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        shared = set.intersection(*(set(each.defaults) for each in optimizers))
        self.defaults: dict[str, Any] = dict.fromkeys(shared)
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = {k: v for each in optimizers for k, v in each.state.items()}  # type: ignore[assignment]


def join_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    if len(optimizers) > 1:
        return JoinedOptimizers(optimizers)
    return optimizers[0] if optimizers else None


def save_alone(
    folder: str,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    step: int,
    extra: Any,
) -> None:
    """Saves the only checkpoint in ``folder``: it replaces those of an earlier run, also of later
    steps, which would be loaded otherwise."""

    def last_step() -> int:
        return max((place.step for place in list_folders(*open_store(folder))), default=0)

    last = RankExchange().run_on_first_rank(f"look into {folder}", last_step)
    save_checkpoint(
        folder, model, join_optimizers(optimizers), step=max(step, last), extra=extra, keep_last=1
    )


def load_joined(
    folder: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], **options: Any
) -> Any:
    """Loads what :func:`save_alone` saved, as :func:`~xla_fsdp.load_checkpoint` does."""
    both = join_optimizers(optimizers)
    loaded = load_checkpoint(folder, model, both, **options)
    if isinstance(both, JoinedOptimizers):
        for each in optimizers:
            each.state.clear()
            for group in each.param_groups:
                each.state.update({p: both.state[p] for p in group["params"] if p in both.state})
    return loaded
