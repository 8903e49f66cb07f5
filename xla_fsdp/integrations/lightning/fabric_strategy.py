"""Fabric's strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _Sharded
from lightning.fabric.utilities.init import _EmptyInit
from torch import nn

from ...names import is_wrapper
from ...sharding.around import is_sharded
from ..saving import outermost
from . import fabric_checkpoints
from .adoption import adopt, require_no_forks
from .collectives import Talking
from .launcher import FabricLauncher
from .metrics import sync_metrics
from .precision import ShardedFabricPrecision, checked_precision
from .ranks import RanksEnvironment, in_rank
from .settings import Policy, Settings


class FabricStrategy(Talking, ParallelStrategy, _Sharded):
    """Shards the modules that ``fabric.setup`` is given; ``Fabric(strategy="xla_fully_sharded")``.

    Takes the arguments of Lightning's ``XLAFSDPStrategy``. Inside a launch of ranks Fabric uses
    these; outside of one, ``fabric.launch(function)`` starts them. Optimizers may be set up before
    or after, with the model or alone.

    Args:
        state_dict_type: ``"sharded"``: ``fabric.save`` writes a folder, to which each rank writes
            its shards. ``"full"``: one file of whole tensors. ``fabric.load`` takes either.
        sequential_save: without effect: ranks write one tensor at a time.
        auto_wrap_policy, activation_checkpointing_policy, options: see :class:`TrainerStrategy`.
        accelerator, parallel_devices, checkpoint_io, precision: set by Fabric.

    Raises:
        ValueError, TypeError: an argument has a value that is not allowed.
    """

    strategy_name = "xla_fully_sharded"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        auto_wrap_policy: Policy | None = None,
        activation_checkpointing_policy: Collection[type[nn.Module]] | None = None,
        state_dict_type: str = "sharded",
        sequential_save: bool = False,
        **options: Any,
    ) -> None:
        self.settings = Settings(
            auto_wrap_policy, activation_checkpointing_policy, state_dict_type, options
        )
        self.modules: list[nn.Module] = []  # that were set up
        super().__init__(
            accelerator, parallel_devices, RanksEnvironment(), checkpoint_io, precision
        )
        self._backward_sync_control = _NoSync()

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        if self.world_size == 1:
            return None
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def precision(self) -> Any:
        return self._precision or ShardedFabricPrecision("32-true")

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._precision = (
            None if precision is None else ShardedFabricPrecision(checked_precision(precision))
        )

    def _configure_launcher(self) -> None:
        self._launcher = None if in_rank() else FabricLauncher(self)

    # -- setting up ----------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Comes before wrapping, which moves shards: whole it need not fit on a chip."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        return _EmptyInit(enabled=bool(empty_init))

    def module_sharded_context(self) -> AbstractContextManager:
        return contextlib.nullcontext()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if is_sharded(module) and not is_wrapper(module) and outermost(module)[0] is not module:
            raise ValueError(f"this {type(module).__name__} was set up already")
        self.settings.require_classes(module)
        wrapped = self.settings.wrap(module, self.precision.precision)
        sync_metrics(wrapped, self.root_device)
        self.modules.append(wrapped)
        return wrapped

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        wrapped = self.setup_module(module)
        return wrapped, [self.setup_optimizer(each) for each in optimizers], scheduler

    def setup_optimizer(self, optimizer: Any) -> Any:
        adopt(optimizer)
        return optimizer

    def process_dataloader(self, dataloader: Any) -> Any:
        require_no_forks(dataloader)
        return _BatchByBatch(dataloader)

    # -- steps ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        return self._reduced(tensor, group, reduce_op)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """By the norm over all ranks. That it is not finite is known, and raised as RuntimeError,
        when the step has run: asking before would cut the step's program."""
        parameters = list(self.precision.main_params(optimizer))
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, float(norm_type))
        if error_if_nonfinite:
            xm.add_step_closure(_require_finite, args=(norm,))
        return norm

    # -- checkpoints ---------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return fabric_checkpoints.state_of(self, module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        fabric_checkpoints.load_state_of(self, module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return fabric_checkpoints.state_of(self, optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        fabric_checkpoints.save(self, path, state, storage_options, filter or {})

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        return fabric_checkpoints.load(self, path, state, strict, weights_only)

    def teardown(self) -> None:
        self.precision.teardown()
        self.checkpoint_io.teardown()


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        no_sync: Any = getattr(module, "no_sync", contextlib.nullcontext)
        return no_sync() if enabled else contextlib.nullcontext()


class _BatchByBatch:
    """A loader that ends a step with each batch: what a loop without optimizer computes would all
    be one program otherwise."""

    def __init__(self, loader: Any) -> None:
        self.__dict__.update(vars(loader))
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            torch_xla.sync()
            yield batch
        torch_xla.sync()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


def _require_finite(norm: torch.Tensor) -> None:
    if not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of all gradients is {norm.item()}, and the step that was clipped by it has "
            "been made: resume from a checkpoint; error_if_nonfinite=False does not look"
        )
