"""Starts ranks for a Trainer or a Fabric that was created outside of a launch.

Each rank works on a copy, as on a TPU, whose ranks are processes. Afterwards the Trainer outside
has the results of the first rank's Trainer, and its model has the trained weights.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.strategies.launchers.xla import _XLALauncher
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher,
    _WorkerOutput,
)

from ...checkpoint.full_state import full_state_dict
from ...ranks.launch import launch
from .collectives import on_host
from .ranks import on_cpu


class FabricLauncher(_XLALauncher):
    """Runs a function on all ranks; returns its result on the first rank."""

    @property
    def is_interactive_compatible(self) -> bool:
        return on_cpu()

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _on_all_ranks(self._strategy, function, args, kwargs)


class TrainerLauncher(_MultiProcessingLauncher):
    """Runs ``fit``, ``test`` and the like on all ranks."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="spawn")

    @property
    def is_interactive_compatible(self) -> bool:
        return on_cpu()

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        if trainer is None:
            return _on_all_ranks(self._strategy, function, args, kwargs)
        if self._already_fit and trainer.state.fn == "fit":
            raise RuntimeError(
                "this Trainer has been fitted, and its ranks have ended with their optimizers. "
                "Create another Trainer and call fit(ckpt_path=...), or call fit twice inside "
                "xla_fsdp.launch"
            )
        tuners = (LearningRateFinder, BatchSizeFinder)
        if any(isinstance(each, tuners) and each._early_exit for each in trainer.callbacks):
            raise RuntimeError(
                "a Tuner outside of the ranks does not get the results of the ranks. Call it "
                "inside xla_fsdp.launch, or give the Trainer a LearningRateFinder callback"
            )
        found = _on_all_ranks(self._strategy, _run_trainer, (trainer, function, args, kwargs), {})
        self._already_fit |= trainer.state.fn == "fit"
        weights, output = found
        self._recover_results_in_main_process(output, trainer)
        if weights is not None:
            trainer.lightning_module.load_state_dict(weights, strict=False)
        return output.trainer_results


def _on_all_ranks(
    strategy: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    with tempfile.TemporaryDirectory(prefix="xla_fsdp-") as folder:
        path = os.path.join(folder, "result")
        number = strategy.num_processes if on_cpu() else None
        launch(_run, (path, function, args, kwargs), num_devices=number)
        return torch.load(path, weights_only=False)


def _run(
    rank: int, path: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> None:
    # CPU ranks receive the same objects, but each must have a copy.
    function, args, kwargs = copy.deepcopy((function, args, kwargs))
    result = on_host(function(*args, **kwargs))
    if rank == 0:
        torch.save(result, path)


def _run_trainer(
    trainer: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[dict[str, Any] | None, _WorkerOutput]:
    trainer.strategy._launcher = None  # the ranks have started already
    results = function(*args, **kwargs)
    fitting = trainer.state.fn == "fit"
    weights = full_state_dict(trainer.strategy.model) if fitting else None
    metrics: Any = _MultiProcessingLauncher.get_extra_results
    extra = metrics(None, trainer)
    best = getattr(trainer.checkpoint_callback, "best_model_path", None)
    return weights, _WorkerOutput(best, None, trainer.state, results, extra)
