"""``save_state`` and ``load_state`` of sharded models, with a checkpoint of this package.

Accelerate still names folders, removes old ones, and writes random states and registered objects.
Models, optimizers and schedulers are hidden from it, and saved by this package.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import clean_state_dict_for_safetensors
from safetensors.torch import save_file
from torch import nn

from ..checkpoint.full_state import full_state_dict
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.rank_exchange import RankExchange
from ..checkpoint.saving import save_checkpoint
from .early_optimizers import JoinedOptimizers, joined
from .sharding import sharding_of

FOLDER = "xla_fsdp"


def save_sharded_state(
    original: Callable[..., Any], accelerator: Accelerator, *args: Any, **kwargs: Any
) -> Any:
    """Implements ``Accelerator.save_state``. Every rank must call it.

    ``xla_fsdp/`` in the folder contains models, optimizers and schedulers, for any number of ranks.
    With the state dict type FULL_STATE_DICT the folder also contains the full parameters in
    ``model.safetensors`` (of a second model in ``model_1.safetensors``).
    """
    with _hidden(accelerator) as (models, optimizers):
        folder = original(accelerator, *args, **kwargs)
    RankExchange().gather_values("save_state", None)  # the folder is there for all
    extra = {
        "step": accelerator.step,
        "schedulers": [each.state_dict() for each in accelerator._schedulers],
    }
    save_checkpoint(
        os.path.join(folder, FOLDER),
        _joined_models(models),
        joined(optimizers) if optimizers else None,
        step=accelerator.save_iteration,
        extra=extra,
        keep_last=1,
    )
    sharding = sharding_of(accelerator.state)
    if sharding is not None and sharding.full_state:
        for number, model in enumerate(models):
            state = full_state_dict(model)
            if accelerator.is_main_process:
                name = f"model_{number}.safetensors" if number else "model.safetensors"
                save_file(clean_state_dict_for_safetensors(state), os.path.join(folder, name))
    accelerator.wait_for_everyone()
    return folder


def load_sharded_state(
    original: Callable[..., Any], accelerator: Accelerator, *args: Any, **kwargs: Any
) -> None:
    """Implements ``Accelerator.load_state``. Every rank must call it. Another number of ranks may
    have saved the folder."""
    folders: list[str] = []

    def note(models: list[nn.Module], folder: str) -> None:
        folders.append(folder)

    handle = accelerator.register_load_state_pre_hook(note)
    try:
        with _hidden(accelerator) as (models, optimizers):
            original(accelerator, *args, **kwargs)
    finally:
        handle.remove()
    both = joined(optimizers) if optimizers else None
    loaded = load_checkpoint(
        os.path.join(folders[0], FOLDER), _joined_models(models), both, restore_rng=True
    )
    if isinstance(both, JoinedOptimizers):
        both.give_back()
    assert loaded is not None, "missing_ok was not given"
    accelerator.step = loaded.extra["step"]
    saved = loaded.extra["schedulers"]
    if len(saved) != len(accelerator._schedulers):
        raise ValueError(
            f"{folders[0]} has the state of {len(saved)} schedulers, but "
            f"{len(accelerator._schedulers)} are prepared: prepare the same ones before load_state"
        )
    for scheduler, state in zip(accelerator._schedulers, saved, strict=True):
        scheduler.load_state_dict(state)


@contextlib.contextmanager
def _hidden(
    accelerator: Accelerator,
) -> Iterator[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
    """Inside, the accelerator has no models, optimizers, schedulers and loaders. Only hooks
    receive the models."""
    names = ("_models", "_optimizers", "_schedulers", "_dataloaders")
    hooks = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")
    before = {name: getattr(accelerator, name) for name in (*names, *hooks)}
    models = before["_models"]
    for loader in before["_dataloaders"]:
        if getattr(getattr(loader, "dataloader", loader), "use_stateful_dataloader", False):
            raise ValueError(
                "use_stateful_dataloader=True is not supported with sharded models, because the "
                "position of the loader cannot be saved: leave the option out and use "
                "accelerator.skip_first_batches"
            )
    try:
        for name in names:
            setattr(accelerator, name, [])
        for name in hooks:
            shown = ((key, _showing(models, hook)) for key, hook in before[name].items())
            setattr(accelerator, name, OrderedDict(shown))
        yield list(models), [each.optimizer for each in before["_optimizers"]]
    finally:
        for name, value in before.items():
            setattr(accelerator, name, value)


def _showing(models: list[nn.Module], hook: Callable[..., None]) -> Callable[..., None]:
    def call(_: Any, *rest: Any) -> None:
        hook(models, *rest)

    return call


def _joined_models(models: list[nn.Module]) -> nn.Module:
    return models[0] if len(models) == 1 else nn.ModuleList(models)
