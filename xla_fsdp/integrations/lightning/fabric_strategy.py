"""The strategy for Fabric, and its checkpoints, which any number of ranks can load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.fsdp import _apply_filter
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl,
    _Sharded,
    _validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.full_state import (
    full_optim_state_dict,
    full_state_dict,
    load_full_optim_state_dict,
    load_full_state_dict,
)
from ...checkpoint.loading import load_checkpoint
from ...checkpoint.rank_exchange import RankExchange
from ...checkpoint.saving import save_checkpoint
from ...collectives.random_state import synced_device
from ...names import is_wrapper
from ...sharding.state import is_sharded
from ..early_optimizers import joined
from ..saving import outermost
from .adoption import adopt, require_no_forks
from .checkpoints import extra_of, give_back, packed, require_kind, unpacked
from .collectives import CollectivesMixin, on_host
from .launcher import FabricLauncher
from .metrics import sync_metrics
from .precision import ShardedFabricPrecision, checked_precision
from .ranks import RanksEnvironment, in_rank
from .settings import Policy, Settings

_Filters = dict[str, Callable[[str, Any], bool]]


class FabricStrategy(CollectivesMixin, ParallelStrategy, _Sharded):
    """Shards the modules of ``fabric.setup``; ``Fabric(strategy="xla_fully_sharded")``.

    It has the arguments of Lightning's ``XLAFSDPStrategy``. Inside a launch Fabric uses its ranks;
    outside of a launch, ``fabric.launch(function)`` starts ranks. Optimizers can be set up before
    or after the model, or together with it.

    Args:
        state_dict_type: ``"sharded"``: ``fabric.save`` creates a folder, to which each rank writes
            its shards. ``"full"``: one file of full tensors. ``fabric.load`` reads both.
        sequential_save: has no effect, because ranks always write one tensor at a time.
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
        self.modules: list[nn.Module] = []  # the modules that were set up
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

    # -- setup ---------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: wrapping moves the shards, and the full module may not fit on a chip."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        return _EmptyInit(enabled=bool(empty_init))

    def module_sharded_context(self) -> AbstractContextManager:
        return contextlib.nullcontext()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if is_sharded(module) and not is_wrapper(module) and outermost(module)[0] is not module:
            raise ValueError(
                f"this {type(module).__name__} was set up already. Call fabric.setup once for it"
            )
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
        """Clips gradients by their norm over all ranks.

        A norm that is not finite raises RuntimeError after the step has run, because a check before
        would cut the step's program.
        """
        parameters = list(self.precision.main_params(optimizer))
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, float(norm_type))
        if error_if_nonfinite:
            xm.add_step_closure(_require_finite, args=(norm,))
        return norm

    # -- checkpoints ---------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return _state_of(self, module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        _load_state_of(self, module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return _state_of(self, optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        _save(self, path, state, storage_options, filter or {})

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        return _load(self, path, state, strict, weights_only)

    def teardown(self) -> None:
        self.precision.teardown()
        self.checkpoint_io.teardown()


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        no_sync: Any = getattr(module, "no_sync", contextlib.nullcontext)
        return no_sync() if enabled else contextlib.nullcontext()


class _BatchByBatch:
    """A loader that runs the pending step before each batch.

    Otherwise all iterations of a loop without an optimizer would be one program.
    """

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
            f"the norm of all gradients is {norm.item()}, and the step with it has already changed "
            "the parameters. Resume from a checkpoint, or set error_if_nonfinite=False to ignore it"
        )


@synced_device()
def _save(
    strategy: Any, path: Any, state: dict[str, Any], storage_options: Any, filters: _Filters
) -> None:
    """Saves a checkpoint; every rank calls it.

    Raises:
        ValueError: filters or storage options were given for a sharded checkpoint, or there is a
            file instead of a folder, or the reverse.
        OtherRankError: another rank could not save.
    """
    exchange = RankExchange()
    wanted = strategy.broadcast(os.fspath(path))
    sharded = strategy.settings.state_dict_type == "sharded"
    require_kind(exchange, wanted, folder=sharded)
    if not sharded:
        whole: dict[str, Any] = {}
        for key, obj in state.items():
            _apply_filter(key, filters, _state_of(strategy, obj), whole)
        write = strategy.checkpoint_io.save_checkpoint
        exchange.run_on_first_rank(
            f"write {wanted}",
            lambda: write(on_host(whole), wanted, storage_options=storage_options),
        )
        return
    models, optimizers, rest = _sorted(state)
    filtered = [key for key in filters if key in models or key in optimizers]
    if filtered or storage_options is not None:
        raise ValueError(
            f"{'filter for ' + ', '.join(filtered) if filtered else 'storage_options'} is not "
            "supported for sharded checkpoints. Leave it out, or use state_dict_type='full'"
        )
    converted: dict[str, Any] = {}
    for key, obj in rest.items():
        _apply_filter(key, filters, _state_of(strategy, obj), converted)
    save_checkpoint(
        wanted,
        _model_of(models, wanted),
        joined(list(optimizers.values())) if optimizers else None,
        step=0,
        extra={"fabric": packed(converted), "optimizers": list(optimizers)},
        keep_last=1,
    )


def _load(
    strategy: Any, path: Any, state: Any, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads a checkpoint; every rank calls it. Returns the entries that are not in ``state``.

    Raises:
        KeyError: ``state`` has keys that are not in the checkpoint, and ``strict`` is true.
        ValueError: the checkpoint is sharded, but ``state`` has no model.
        CheckpointError: the checkpoint is damaged, or does not fit ``state``.
    """
    wanted = strategy.broadcast(os.fspath(path))
    if get_filesystem(wanted).isdir(wanted):
        return _load_folder(wanted, state, strict, weights_only)
    found = strategy.checkpoint_io.load_checkpoint(wanted, weights_only=weights_only)
    if not state:
        return found
    if isinstance(state, (nn.Module, Optimizer)):
        _load_state_of(strategy, state, found, strict)
        return {}
    _validate_keys_for_strict_loading(state.keys(), found.keys(), strict=strict)
    # Load models first: an optimizer's state may refer to parameters that a model loads.
    for key in sorted(state, key=lambda key: not isinstance(state[key], nn.Module)):
        if key not in found:
            continue
        if isinstance(state[key], _Stateful):
            _load_state_of(strategy, state[key], found.pop(key), strict)
        else:
            state[key] = found.pop(key)
    return found


def _load_folder(path: str, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} is a sharded checkpoint, which needs a model to load into. Call "
            "fabric.load(path, {'model': model, ...}) with the keys that were saved, or convert it "
            "to one file with python -m xla_fsdp.consolidate"
        )
    models, optimizers, rest = _sorted(state)
    folder, extra = extra_of(path)
    if not isinstance(extra, dict) or "fabric" not in extra:
        raise ValueError(
            f"{folder} was not saved by fabric.save. Load it with xla_fsdp.load_checkpoint"
        )
    saved = unpacked(extra["fabric"], weights_only)
    _validate_keys_for_strict_loading(rest, saved.keys(), strict=strict)
    missing = [key for key in optimizers if key not in extra["optimizers"]]
    if missing or (optimizers and list(optimizers) != extra["optimizers"]):
        raise KeyError(
            f"{folder} has the optimizers {extra['optimizers']}, in this order, but the state to "
            f"load into has {list(optimizers)}. Pass the same optimizers, or none"
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


def _state_of(strategy: Any, obj: Any) -> Any:
    """The value to save for ``obj``: the full state of a model or optimizer, on the first rank."""
    if isinstance(obj, nn.Module) and is_sharded(obj):
        return full_state_dict(obj)
    if isinstance(obj, Optimizer):
        return full_optim_state_dict(_model_with(strategy, obj), obj)
    return obj.state_dict() if isinstance(obj, _Stateful) else obj


def _load_state_of(strategy: Any, obj: Any, state: Any, strict: bool) -> None:
    if isinstance(obj, nn.Module) and is_sharded(obj):
        load_full_state_dict(obj, state, strict=strict)
    elif isinstance(obj, nn.Module):
        obj.load_state_dict(state, strict=strict)
    elif isinstance(obj, Optimizer):
        load_full_optim_state_dict(_model_with(strategy, obj), obj, state)
    else:
        obj.load_state_dict(state)


def _model_with(strategy: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The module that was set up and has the parameters of ``optimizer``."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [
        module
        for module in strategy.modules
        if wanted & {id(parameter) for parameter in module.parameters()}
    ]
    if not found:
        raise ValueError(
            f"this {type(optimizer).__name__} has no parameter of a model that was set up. Call "
            "fabric.setup with its model"
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
    """The model, or a module of all models by their keys."""
    if not models:
        raise ValueError(
            f"{path}: the state has no model, which a sharded checkpoint needs. Pass for example "
            "{'model': model, 'optimizer': optimizer}"
        )
    return next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(models)
