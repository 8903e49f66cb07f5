"""Ranks for Lightning: environment, accelerator, ``rank_zero_only``, and launchers.

The launchers start ranks for a Trainer or a Fabric outside of a launch. Each rank works on a copy.
Afterwards the Trainer outside has the results of the first rank's, and its model the weights.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from lightning.fabric.plugins.environments import XLAEnvironment
from lightning.fabric.strategies.launchers.xla import _XLALauncher
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher,
    _WorkerOutput,
)

from ... import xlac
from ...checkpoint.full_state import full_state_dict
from ...compiled.cache import platform_of_ranks
from ...ranks.cpu.runtime import DEFAULT_RANKS
from ...ranks.launch import launch
from ...ranks.rank import current_rank


def in_rank() -> bool:
    """Whether this is a rank. Does not start the runtime: that would prevent starting ranks."""
    if current_rank() is not None or xenv.PJRT_LOCAL_PROCESS_RANK in os.environ:
        return True
    return dist.is_torchelastic_launched() and dist.is_initialized()


def ranks_are_threads() -> bool:
    """Whether ranks are (or would be) threads of one process."""
    return platform_of_ranks() == "CPU"


def number_of_ranks_here() -> int:
    """Running ranks, or those to be started."""
    context = current_rank()
    if context is not None:
        return context.size
    if in_rank():
        return xr.local_device_count()
    if ranks_are_threads():
        return int(os.environ.get("CPU_NUM_DEVICES", DEFAULT_RANKS))
    return xlac.host_device_count()


class RanksEnvironment(XLAEnvironment):
    """The ranks of this package's or torch_xla's launch; outside of a launch, rank 0."""

    # Not cached, as in Lightning: ranks may be threads.
    def world_size(self) -> int:
        return xr.world_size() if in_rank() else 1

    def global_rank(self) -> int:
        return xr.global_ordinal() if in_rank() else 0

    def local_rank(self) -> int:
        return xr.local_ordinal() if in_rank() else 0

    def node_rank(self) -> int:
        return xr.host_index() if in_rank() and not ranks_are_threads() else 0


class RanksAccelerator(Accelerator):
    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {} if ranks_are_threads() else dict(xm.get_memory_info(device))

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """The number of devices of this host; raises ValueError if it is not possible."""
        number, found = devices, number_of_ranks_here()
        if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
            number = int(devices)
        if isinstance(number, (list, tuple)):
            number = list(number)
        every = [-1, "auto", found, list(range(found)), xr.world_size() if in_rank() else found]
        if number in every and not isinstance(number, bool):
            return found
        if type(number) is int and 1 <= number <= 8 and ranks_are_threads() and not in_rank():
            return number
        if in_rank():
            raise ValueError(
                f"devices={devices!r}, but {found} ranks are running already, and all must take "
                "part. Leave devices out, or start another number of ranks"
            )
        allowed = "1 to 8" if ranks_are_threads() else f"{found}, all of this host"
        raise ValueError(f"devices must be 'auto' or {allowed}, got {devices!r}")

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("xla", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return number_of_ranks_here()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "xla_ranks"


def root_device() -> torch.device:
    """This rank's device; raises RuntimeError outside of the ranks."""
    if not in_rank():
        raise RuntimeError(
            "there is no XLA device outside of the ranks, which Trainer.fit and Fabric.launch "
            "start. Use the device inside of the ranks"
        )
    return torch_xla.device()


def to_host(obj: Any) -> Any:
    return move_data_to_device(obj, torch.device("cpu"))


class CurrentRankNumber:
    """``rank_zero_only.rank``: an integer that depends on the rank that reads it, as ranks may be
    threads. Lightning has one number for a process."""

    def __init__(self, outside: int) -> None:
        self._outside = outside

    def number(self) -> int:
        return xr.global_ordinal() if in_rank() else self._outside

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.number(),)


def _delegate_to_int(name: str) -> Callable[..., Any]:
    def call(self: CurrentRankNumber, *others: Any) -> Any:
        plain = (one.number() if isinstance(one, CurrentRankNumber) else one for one in others)
        return getattr(self.number(), name)(*plain)

    return call


for _name in (
    "index int hash bool str repr format eq ne lt le gt ge add radd sub rsub mul rmul mod rmod "
    "floordiv rfloordiv"
).split():
    setattr(CurrentRankNumber, f"__{_name}__", _delegate_to_int(f"__{_name}__"))


class FabricLauncher(_XLALauncher):
    @property
    def is_interactive_compatible(self) -> bool:
        return ranks_are_threads()

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _on_all_ranks(self._strategy, function, args, kwargs)


class TrainerLauncher(_MultiProcessingLauncher):
    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="spawn")

    @property
    def is_interactive_compatible(self) -> bool:
        return ranks_are_threads()

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
        weights, output = _on_all_ranks(
            self._strategy, _run_trainer, (trainer, function, args, kwargs), {}
        )
        self._already_fit |= trainer.state.fn == "fit"
        self._recover_results_in_main_process(output, trainer)
        if weights is not None:
            trainer.lightning_module.load_state_dict(weights, strict=False)
        return output.trainer_results


def _on_all_ranks(
    strategy: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    with tempfile.TemporaryDirectory(prefix="xla_fsdp-") as folder:
        path = os.path.join(folder, "result")
        number = strategy.num_processes if ranks_are_threads() else None
        launch(_run_and_save, (path, function, args, kwargs), num_devices=number)
        return torch.load(path, weights_only=False)


def _run_and_save(
    rank: int, path: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> None:
    # CPU ranks receive the same objects, but each must have a copy.
    function, args, kwargs = copy.deepcopy((function, args, kwargs))
    result = to_host(function(*args, **kwargs))
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
