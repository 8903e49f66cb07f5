"""The strategy for the Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch_xla
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from ...layers.batch_norm import SyncBatchNorm
from ...sharding.state import is_sharded
from ..saving import outermost
from . import checkpoints
from .adoption import adopt, require_no_forks
from .collectives import CollectivesMixin
from .launcher import TrainerLauncher
from .metrics import sync_metrics
from .precision import ShardedTrainerPrecision, checked_precision
from .ranks import RanksEnvironment, in_rank
from .settings import Policy, Settings


class TrainerStrategy(CollectivesMixin, ParallelStrategy):
    """Shards a ``LightningModule`` over the ranks; ``Trainer(strategy="xla_fully_sharded")``.

    Inside a launch the Trainer uses its ranks. Outside of a launch, ``fit``, ``test`` and the like
    start ranks: on the CPU ``devices`` of them, on a TPU one for each chip.

    With manual optimization, each submodule of the ``LightningModule`` is wrapped instead of the
    ``LightningModule``, so that submodules can be trained in turn.

    Args:
        auto_wrap_policy: classes of layers to wrap separately, or a function
            ``(module, recurse, unwrapped_params) -> bool``. Default: none, one unit for all.
        activation_checkpointing_policy: classes of layers to recompute in the backward; these
            layers must be wrapped separately.
        state_dict_type: ``"full"``: checkpoints are one file, which every Trainer and
            ``load_from_checkpoint`` can read. ``"sharded"``: a folder, to which each rank writes
            its shards. Both can be resumed with either setting, on any number of ranks.
        options: options of :class:`~xla_fsdp.XlaFullyShardedDataParallel`; ``sharding_strategy``
            can also be a string. The default of ``sync_module_states`` is True.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: set by the Trainer.

    Raises:
        ValueError, TypeError: an argument has a value that is not allowed.
    """

    strategy_name = "xla_fully_sharded"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        auto_wrap_policy: Policy | None = None,
        activation_checkpointing_policy: Collection[type[nn.Module]] | None = None,
        state_dict_type: str = "full",
        **options: Any,
    ) -> None:
        self.settings = Settings(
            auto_wrap_policy, activation_checkpointing_policy, state_dict_type, options
        )
        # The model state of a checkpoint that was loaded before the setup, and ``strict``.
        self._restored: tuple[Mapping[str, Any], bool] | None = None
        self._is_set_up = False
        super().__init__(
            accelerator, parallel_devices, RanksEnvironment(), checkpoint_io, precision_plugin
        )

    # -- ranks ---------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin or ShardedTrainerPrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = (
            None if plugin is None else ShardedTrainerPrecision(checked_precision(plugin))
        )

    def _configure_launcher(self) -> None:
        self._launcher = None if in_rank() else TrainerLauncher(self)

    # -- setup ---------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        require_no_forks(dataloader)
        return dataloader

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Creates models on the CPU or the meta device, as full models may not fit on a chip."""
        with _EmptyInit(enabled=bool(empty_init)):
            yield

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._restored, self._is_set_up = None, False

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = self._wrapped(module)
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

    def _wrapped(self, module: nn.Module) -> nn.Module:
        precision = self.precision_plugin.precision
        automatic = bool(getattr(module, "automatic_optimization", True))
        if automatic and is_sharded(module):
            root, _ = outermost(module)
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

    def model_to_device(self) -> None:
        """Does nothing: shards are on the device already."""

    def teardown(self) -> None:
        """Keeps shards on the device, for the next ``fit``, ``test`` or save."""
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()

    # -- steps ---------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.computing():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().predict_step, args, kwargs)

    def _evaluated(self, step: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        with self.computing():
            result = step(*args, **kwargs)
        torch_xla.sync()
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context for a micro-batch without a step. Its gradients are still reduced.

        Reduced gradients are sharded, so they need 1 / ``world_size`` of the memory.
        """
        yield
        torch_xla.sync()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        return self._reduced(tensor, group, reduce_op)

    # -- checkpoints ---------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state on the first rank; empty if each rank writes its shards."""
        return checkpoints.state_of_model(self)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return checkpoints.state_of_optimizer(self, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        checkpoints.save(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return checkpoints.read(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Stores the state until the setup, which loads it after the model is sharded."""
        if self._is_set_up:
            checkpoints.load_model(self, checkpoint, strict)
        else:
            self._restored = checkpoint, strict

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.load_optimizers(self, checkpoint)
