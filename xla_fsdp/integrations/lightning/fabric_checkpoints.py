"""What ``fabric.save`` writes and ``fabric.load`` takes, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _apply_filter
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.full_optimizer import full_optim_state_dict, load_full_optim_state_dict
from ...checkpoint.full_state import full_state_dict, load_full_state_dict
from ...checkpoint.loading import load_checkpoint
from ...checkpoint.meeting import Meeting
from ...checkpoint.saving import save_checkpoint
from ...collectives.random_state import at_rest
from ...sharding.around import is_sharded
from ..held_shards import joined
from .checkpoints import extra_of, give_back, packed, require_kind, unpacked
from .collectives import on_host

Filters = dict[str, Callable[[str, Any], bool]]


@at_rest()
def save(
    strategy: Any, path: Any, state: dict[str, Any], storage_options: Any, filters: Filters
) -> None:
    """Every rank calls it.

    Raises:
        ValueError: filters or storage options with shards; or something of the other kind is there.
        OtherRankError: another rank could not.
    """
    meeting = Meeting()
    wanted = strategy.broadcast(os.fspath(path))
    sharded = strategy.settings.state_dict_type == "sharded"
    require_kind(meeting, wanted, folder=sharded)
    if not sharded:
        whole: dict[str, Any] = {}
        for key, obj in state.items():
            _apply_filter(key, filters, state_of(strategy, obj), whole)
        write = strategy.checkpoint_io.save_checkpoint
        meeting.first(
            f"write {wanted}",
            lambda: write(on_host(whole), wanted, storage_options=storage_options),
        )
        return
    models, optimizers, rest = _sorted(state)
    filtered = [key for key in filters if key in models or key in optimizers]
    if filtered or storage_options is not None:
        raise ValueError(
            f"{'filter for ' + ', '.join(filtered) if filtered else 'storage_options'}: sharded "
            "checkpoints take none; use state_dict_type='full'"
        )
    converted: dict[str, Any] = {}
    for key, obj in rest.items():
        _apply_filter(key, filters, state_of(strategy, obj), converted)
    save_checkpoint(
        wanted,
        _model_of(models, wanted),
        joined(list(optimizers.values())) if optimizers else None,
        step=0,
        extra={"fabric": packed(converted), "optimizers": list(optimizers)},
        keep_last=1,
    )


def load(
    strategy: Any, path: Any, state: Any, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Every rank calls it; returns what of the checkpoint is not in ``state``.

    Raises:
        KeyError: ``state`` has keys that the checkpoint has not, and ``strict``.
        ValueError: a sharded checkpoint, and no model to load it into.
        CheckpointError: it is damaged, or does not fit.
    """
    wanted = strategy.broadcast(os.fspath(path))
    if get_filesystem(wanted).isdir(wanted):
        return _load_folder(wanted, state, strict, weights_only)
    found = strategy.checkpoint_io.load_checkpoint(wanted, weights_only=weights_only)
    if not state:
        return found
    if isinstance(state, (nn.Module, Optimizer)):
        load_state_of(strategy, state, found, strict)
        return {}
    _validate_keys_for_strict_loading(state.keys(), found.keys(), strict=strict)
    # An optimizer's state may name parameters that a model is about to get.
    for key in sorted(state, key=lambda key: not isinstance(state[key], nn.Module)):
        if key not in found:
            continue
        if isinstance(state[key], _Stateful):
            load_state_of(strategy, state[key], found.pop(key), strict)
        else:
            state[key] = found.pop(key)
    return found


def _load_folder(path: str, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} is a sharded checkpoint: pass what it is loaded into as "
            "fabric.load(path, {'model': model, ...}), keys as they were saved, or make one file "
            "of it with python -m xla_fsdp.consolidate"
        )
    models, optimizers, rest = _sorted(state)
    folder, extra = extra_of(path)
    if not isinstance(extra, dict) or "fabric" not in extra:
        raise ValueError(
            f"{folder} was not saved by fabric.save: load it with xla_fsdp.load_checkpoint"
        )
    saved = unpacked(extra["fabric"], weights_only)
    _validate_keys_for_strict_loading(rest, saved.keys(), strict=strict)
    missing = [key for key in optimizers if key not in extra["optimizers"]]
    if missing or (optimizers and list(optimizers) != extra["optimizers"]):
        raise KeyError(
            f"{folder} has the optimizers {extra['optimizers']}, in this order, and the state to "
            f"load into has {list(optimizers)}: pass the same, or none"
        )
    both = joined(list(optimizers.values())) if optimizers else None
    load_checkpoint(folder, _model_of(models, path), both, strict=strict, restore_rng=False)
    give_back(both)
    for key in rest:
        if key not in saved:
            continue
        if isinstance(rest[key], _Stateful):
            rest[key].load_state_dict(saved.pop(key))
        else:
            state[key] = saved.pop(key)
    return saved


def state_of(strategy: Any, obj: Any) -> Any:
    """What is saved of ``obj``: of a model or an optimizer the whole state, on the first rank."""
    if isinstance(obj, nn.Module) and is_sharded(obj):
        return full_state_dict(obj)
    if isinstance(obj, Optimizer):
        return full_optim_state_dict(_model_with(strategy, obj), obj)
    return obj.state_dict() if isinstance(obj, _Stateful) else obj


def load_state_of(strategy: Any, obj: Any, state: Any, strict: bool) -> None:
    if isinstance(obj, nn.Module) and is_sharded(obj):
        load_full_state_dict(obj, state, strict=strict)
    elif isinstance(obj, nn.Module):
        obj.load_state_dict(state, strict=strict)
    elif isinstance(obj, Optimizer):
        load_full_optim_state_dict(_model_with(strategy, obj), obj, state)
    else:
        obj.load_state_dict(state)


def _model_with(strategy: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
    """What of the modules that were set up has the parameters of ``optimizer``."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [
        module
        for module in strategy.modules
        if wanted & {id(parameter) for parameter in module.parameters()}
    ]
    if not found:
        raise ValueError(
            f"this {type(optimizer).__name__} has no parameter of a model that was set up"
        )
    return found[0] if len(found) == 1 else nn.ModuleList(found)


def _sorted(
    state: dict[str, Any],
) -> tuple[dict[str, nn.Module], dict[str, Optimizer], dict[str, Any]]:
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    rest = {key: v for key, v in state.items() if key not in models and key not in optimizers}
    return models, optimizers, rest


def _model_of(models: dict[str, nn.Module], path: str) -> nn.Module:
    """The model, or all of them by their keys."""
    if not models:
        raise ValueError(
            f"{path}: the state has no model; a sharded checkpoint is of one, e.g. "
            "{'model': model, 'optimizer': optimizer}"
        )
    return next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(models)
