"""The strategies for the Trainer and for Fabric."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from lightning.fabric.strategies import ParallelStrategy as ParallelFabricStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _Sharded
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import ParallelStrategy as ParallelTrainerStrategy
from torch import nn

from ...layers.batch_norm import SyncBatchNorm
from ...names import is_wrapper
from ...ranks.rank import current_rank
from ...sharding.optimizer_hook import has_shards
from ...sharding.state import is_sharded
from ..full_weights import outermost_wrapper
from ..optimizers import switch_to_shards
from .checkpoints import FabricCheckpoints, TrainerCheckpoints
from .collectives import CollectivesMixin, sync_metrics
from .ranks import FabricLauncher, RanksEnvironment, TrainerLauncher, in_rank
from .wrap_settings import (
    LightningPolicy,
    ShardedFabricPrecision,
    ShardedTrainerPrecision,
    WrapSettings,
)


class _CommonStrategy(CollectivesMixin):
    strategy_name = "xla_fully_sharded"
    parallel_devices: Any
    world_size: int
    global_rank: int

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        if self.world_size == 1:
            return None
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Raises ValueError if workers would be forked from ranks that are threads."""
        context = getattr(dataloader, "multiprocessing_context", None)
        forks = context is None or context.get_start_method() == "fork"
        workers = getattr(dataloader, "num_workers", 0)
        if workers and current_rank() is not None and forks:
            raise ValueError(
                f"num_workers={workers} would fork this process, which has CPU ranks as threads. "
                "Pass multiprocessing_context='forkserver' to the DataLoader, or num_workers=0"
            )
        return dataloader


class TrainerStrategy(TrainerCheckpoints, _CommonStrategy, ParallelTrainerStrategy):
    """Shards a ``LightningModule`` over the ranks; ``Trainer(strategy="xla_fully_sharded")``.

    Outside of a launch, ``fit``, ``test`` and the like start ranks: on the CPU ``devices`` of them,
    on a TPU one for each chip. With manual optimization, each submodule is wrapped separately, so
    that submodules can be trained in turn.

    Args:
        auto_wrap_policy: classes of layers to wrap separately, or a function
            ``(module, recurse, unwrapped_params) -> bool``. Default: none, one unit for all.
        activation_checkpointing_policy: classes of layers to recompute in the backward; these
            layers must be wrapped separately.
        state_dict_type: ``"full"``: checkpoints are one file, which every Trainer and
            ``load_from_checkpoint`` can read. ``"sharded"``: a folder, to which each rank writes
            its shards. Either setting resumes both, on any number of ranks.
        options: options of :class:`~xla_fsdp.XlaFullyShardedDataParallel`; ``sharding_strategy``
            can also be a string. The default of ``sync_module_states`` is True.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: set by the Trainer.

    Raises:
        ValueError, TypeError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        auto_wrap_policy: LightningPolicy | None = None,
        activation_checkpointing_policy: Collection[type[nn.Module]] | None = None,
        state_dict_type: str = "full",
        **options: Any,
    ) -> None:
        self.settings = WrapSettings(
            auto_wrap_policy, activation_checkpointing_policy, state_dict_type, options
        )
        super().__init__(
            accelerator, parallel_devices, RanksEnvironment(), checkpoint_io, precision_plugin
        )

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin or ShardedTrainerPrecision(None)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else ShardedTrainerPrecision(plugin)

    def _configure_launcher(self) -> None:
        self._launcher = None if in_rank() else TrainerLauncher(self)

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        """Models on the CPU or the meta device, as full models may not fit on a chip."""
        return _EmptyInit(enabled=bool(empty_init))

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._restored, self._is_set_up = None, False

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = self._wrap_module(module)
        _update_properties(module, device=self.root_device)
        sync_metrics(module, self.root_device)
        # Use no_grad: inference tensors cannot be saved for a backward.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._is_set_up = True
        if self._restored is not None:
            self.load_model_state_dict(*self._restored)
            self._restored = None

    def _wrap_module(self, module: nn.Module) -> nn.Module:
        precision = self.precision_plugin.precision
        automatic = bool(getattr(module, "automatic_optimization", True))
        if automatic and is_sharded(module):
            root, _ = outermost_wrapper(module)
            if root is not module:  # wrapped by an earlier fit, validate, ...
                return root
        if self._layer_sync is not None:
            if not isinstance(self._layer_sync, TorchSyncBatchNorm):
                raise ValueError(
                    f"plugins: {type(self._layer_sync).__name__} is not supported on XLA. Use "
                    "sync_batchnorm=True, which replaces batch norms by xla_fsdp.SyncBatchNorm"
                )
            module = SyncBatchNorm.convert_sync_batchnorm(module)
        self.settings.require_classes(module)
        if automatic:
            root = self.settings.wrap(module, precision)
            if root is not module:
                # The trainer does not keep it after a run, but the next run may use the module.
                module.__dict__["_xla_fsdp_root"] = root
            return root
        self.settings.wrap_children(module, precision)
        return module

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            adopt(optimizer)
        self._require_vectors_in_optimizers()

    def _require_vectors_in_optimizers(self) -> None:
        """Raises ValueError if a vector of ``flatten_parameters`` would silently not be trained:
        those of the root belong to the wrapper, so ``self.parameters()`` has none of them."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        assert self.model is not None
        for name, parameter in self.model.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in updated:
                raise ValueError(
                    f"no optimizer updates {name}, in which flatten_parameters stores parameters "
                    f"of {type(self.lightning_module).__name__}. In configure_optimizers use "
                    "self.trainer.model.parameters() instead of self.parameters()"
                )

    def model_to_device(self) -> None:
        """Does nothing: shards are on the device already."""

    def teardown(self) -> None:
        """Keeps shards on the device, for the next ``fit``, ``test`` or save."""
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.computing():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_evaluation_step(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_evaluation_step(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_evaluation_step(super().predict_step, args, kwargs)

    def _run_evaluation_step(self, step: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        with self.computing():
            result = step(*args, **kwargs)
        torch_xla.sync()
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients are still reduced: sharded ones need less memory."""
        yield
        torch_xla.sync()


class FabricStrategy(FabricCheckpoints, _CommonStrategy, ParallelFabricStrategy, _Sharded):
    """Shards the modules of ``fabric.setup``; ``Fabric(strategy="xla_fully_sharded")``.

    It has the arguments of Lightning's ``XLAFSDPStrategy``. Outside of a launch,
    ``fabric.launch(function)`` starts ranks.

    Args:
        state_dict_type: ``"sharded"``: ``fabric.save`` creates a folder, to which each rank writes
            its shards. ``"full"``: one file of full tensors. ``fabric.load`` reads both.
        sequential_save: has no effect, because ranks always write one tensor at a time.
        auto_wrap_policy, activation_checkpointing_policy, options: see :class:`TrainerStrategy`.
        accelerator, parallel_devices, checkpoint_io, precision: set by Fabric.

    Raises:
        ValueError, TypeError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        auto_wrap_policy: LightningPolicy | None = None,
        activation_checkpointing_policy: Collection[type[nn.Module]] | None = None,
        state_dict_type: str = "sharded",
        sequential_save: bool = False,
        **options: Any,
    ) -> None:
        self.settings = WrapSettings(
            auto_wrap_policy, activation_checkpointing_policy, state_dict_type, options
        )
        self.modules: list[nn.Module] = []  # the modules that were set up
        super().__init__(
            accelerator, parallel_devices, RanksEnvironment(), checkpoint_io, precision
        )
        self._backward_sync_control = _NoSync()

    @property
    def precision(self) -> Any:
        return self._precision or ShardedFabricPrecision(None)

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._precision = None if precision is None else ShardedFabricPrecision(precision)

    def _configure_launcher(self) -> None:
        self._launcher = None if in_rank() else FabricLauncher(self)

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: wrapping moves the shards, and the full module may not fit on a chip."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        return _EmptyInit(enabled=bool(empty_init))

    def module_sharded_context(self) -> AbstractContextManager:
        return contextlib.nullcontext()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if (
            is_sharded(module)
            and not is_wrapper(module)
            and outermost_wrapper(module)[0] is not module
        ):
            raise ValueError(
                f"this {type(module).__name__} was set up already. Call fabric.setup once for it"
            )
        self.settings.require_classes(module)
        wrapped = self.settings.wrap(module, self.precision.precision)
        sync_metrics(wrapped, self.root_device)
        self.modules.append(wrapped)
        return wrapped

    def _parse_fsdp_kwargs(self) -> dict[str, Any]:
        """Called by scripts for Lightning's strategy (litgpt), which wrap submodules one by one."""
        return self.settings.options_of_wrapper(self.precision.precision)

    def setup_optimizer(self, optimizer: Any) -> Any:
        adopt(optimizer)
        return optimizer

    def process_dataloader(self, dataloader: Any) -> Any:
        return _BatchByBatch(super().process_dataloader(dataloader))

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """A norm that is not finite raises RuntimeError after the step has run, because a check
        before would cut the step's program."""
        parameters = list(self.precision.main_params(optimizer))
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, float(norm_type))
        if error_if_nonfinite:
            xm.add_step_closure(_require_finite, args=(norm,))
        return norm


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        no_sync: Any = getattr(module, "no_sync", contextlib.nullcontext)
        return no_sync() if enabled else contextlib.nullcontext()


class _BatchByBatch:
    """Runs the pending step before each batch, so that each iteration is a program."""

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


def adopt(optimizer: torch.optim.Optimizer) -> None:
    """Replaces the parameters of ``optimizer`` by shards. Raises ValueError if it has none of a
    wrapped model, or has made steps already."""
    switch_to_shards(optimizer)
    if not has_shards(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} has no parameter of a model that was set up. Create "
            "it with the parameters of the model that is trained"
        )
