"""Registers the strategies with Lightning, and changes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import lightning.fabric.fabric
import lightning.fabric.strategies
import lightning.fabric.utilities.throughput
import lightning.pytorch.callbacks.throughput_monitor
import lightning.pytorch.trainer.connectors.data_connector
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator, XLAAccelerator
from lightning.fabric.connector import _Connector
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import xla_fsdp as theirs
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities import model_summary
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ...sharding.state import is_sharded
from ..changes import LibraryChanges
from ..full_weights import count_full_parameters
from ..sharding import wrap_recomputed
from .ranks import CurrentRankNumber, RanksAccelerator, ranks_are_threads
from .strategies import FabricStrategy, TrainerStrategy

changes = LibraryChanges("lightning", extra="lightning")
# Further changes, which make Lightning's own names select this package.
drop_in = LibraryChanges("lightning", extra="lightning")

NAME = TrainerStrategy.strategy_name
DROP_IN_NAME = "xla_fsdp"


def install() -> None:
    """Registers the strategies and makes the changes, unless this was done already."""
    changes.apply()
    _register_strategies(NAME)


def install_drop_in() -> None:
    """Makes ``"xla_fsdp"`` and Lightning's ``XLAFSDPStrategy`` also select this package."""
    install()
    drop_in.apply()
    _register_strategies(DROP_IN_NAME)


def uninstall() -> None:
    changes.undo()
    drop_in.undo()
    for registry in (STRATEGY_REGISTRY, StrategyRegistry):
        registry.pop(NAME, None)
        registry.pop(DROP_IN_NAME, None)
    theirs.XLAFSDPStrategy.register_strategies(STRATEGY_REGISTRY)


def _register_strategies(name: str) -> None:
    for registry, strategy in (
        (STRATEGY_REGISTRY, FabricStrategy),
        (StrategyRegistry, TrainerStrategy),
    ):
        registry.register(name, strategy, description="xla_fsdp", override=True)


def _is_ours(strategy: Any) -> bool:
    return isinstance(strategy, (TrainerStrategy, FabricStrategy))


def _with_ranks(original: Any, self: Any, **kwargs: Any) -> None:
    """Sets our accelerator: Lightning allows its TPU accelerator only for its own strategies."""
    strategy, accelerator = kwargs["strategy"], kwargs["accelerator"]
    registry = STRATEGY_REGISTRY if isinstance(self, _Connector) else StrategyRegistry
    known = isinstance(strategy, str) and strategy.lower() in registry
    named = registry[strategy.lower()]["strategy"] if known else None
    if named in (TrainerStrategy, FabricStrategy) or _is_ours(strategy):
        right = (CPUAccelerator, XLAAccelerator, RanksAccelerator)
        if accelerator not in ("auto", "tpu", "cpu") and not isinstance(accelerator, right):
            raise ValueError(
                f"accelerator={accelerator!r} is not supported by strategy {NAME!r}, whose ranks "
                "are on XLA devices. Leave accelerator out, or set 'auto', 'tpu' or 'cpu'"
            )
        if getattr(strategy, "_accelerator", None) is None:
            kwargs["accelerator"] = RanksAccelerator()
        else:  # the accelerator of a strategy that was used before
            kwargs["accelerator"] = "auto"
    original(self, **kwargs)


for _connector in (_Connector, _AcceleratorConnector):
    changes.around(_connector, "_check_config_and_set_final_flags")(_with_ranks)


_entering = threading.Lock()
_inside: dict[Any, tuple[int, ExitStack]] = {}  # the number of ranks in a context, and its end


@contextlib.contextmanager
def _enter_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """A context that the first rank enters, the last one leaves, and all share. It changes methods
    of a class; a second entry would save changed ones, and restore these at its end."""
    key = (*args, *sorted(kwargs.items()))
    with _entering:
        count, stack = _inside.get(key) or (0, ExitStack())
        if not count:
            stack.enter_context(original(*args, **kwargs))
        _inside[key] = count + 1, stack
    try:
        yield
    finally:
        with _entering:
            count, stack = _inside.pop(key)
            if count > 1:
                _inside[key] = count - 1, stack
            else:
                stack.close()


for _place in (lightning.fabric.fabric, lightning.pytorch.trainer.connectors.data_connector):
    changes.around(_place, "_replace_dunder_methods")(_enter_once)

changes.set(rank_zero_only, "rank", CurrentRankNumber(int(vars(rank_zero_only).get("rank") or 0)))


@changes.around(Fabric, "rank_zero_first")
@contextlib.contextmanager
def _rank_zero_first(original: Any, self: Fabric, local: bool = False) -> Iterator[None]:
    if not _is_ours(self.strategy):
        with original(self, local):
            yield
        return
    first = (self.local_rank if local else self.global_rank) == 0
    if not first:
        self.barrier("rank_zero_first")
    yield
    if first:
        self.barrier("rank_zero_first")


def _forbid_callback(callback: type, stages: Collection[str], why: str) -> None:
    @changes.around(callback, "setup")
    def set_up(original: Any, self: Any, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage in stages and _is_ours(trainer.strategy):
            raise MisconfigurationException(f"{type(self).__name__} {why}")
        original(self, trainer, pl_module, stage)


for _averaging in (StochasticWeightAveraging, WeightAveraging):
    _forbid_callback(
        _averaging,
        ["fit"],
        "copies the model before it is sharded, and would average full parameters with "
        "shards. Leave the callback out and average in the module: in on_fit_start, when the "
        "model is sharded, create a torch.optim.swa_utils.AveragedModel of self.net (or another "
        "submodule) and store it in a list, so that it is not a submodule; in "
        "on_train_batch_end, call its update_parameters(self.net)",
    )

_forbid_callback(
    ModelPruning,
    list(TrainerFn),
    "would prune each rank's shards separately, and save them. Leave the callback out and "
    "prune the module with torch.nn.utils.prune before trainer.fit: the masks are buffers, which "
    "training applies and checkpoints contain",
)


@changes.around(lightning.fabric.utilities.throughput, "get_available_flops")
@changes.around(lightning.pytorch.callbacks.throughput_monitor, "get_available_flops")
def _available_flops(original: Any, device: Any, dtype: Any) -> int | None:
    """None on CPU ranks, for which Lightning would query the metadata server."""
    return None if device.type == "xla" and ranks_are_threads() else original(device, dtype)


@changes.around(XLAAccelerator, "auto_device_count")
def _number_of_tpus(original: Any) -> int:
    """Returns 0 without a TPU: Lightning would query the metadata server, and raise TypeError after
    an import of jax, which disables such queries with ``TPU_SKIP_MDS_QUERY``."""
    return 0 if ranks_are_threads() else original()


@changes.around(_LRCallback, "on_train_batch_end")
def _record_mean_loss(
    original: Any, self: Any, trainer: Trainer, pl_module: Any, outputs: Any, *batch: Any
) -> None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if loss is not None and _is_ours(trainer.strategy):
        outputs = trainer.strategy.reduce(loss)
    original(self, trainer, pl_module, outputs, *batch)


class _FullSummary(model_summary.ModelSummary):
    def _forward_example_input(self) -> None:
        """Does nothing: sizes of inputs need a forward with full parameters."""

    @property
    def param_nums(self) -> list[int]:
        modules = dict(self.named_modules)
        return [count_full_parameters(modules[name]) for name in self.layer_names]

    @property
    def total_parameters(self) -> int:
        return count_full_parameters(self._model)

    @property
    def trainable_parameters(self) -> int:
        return count_full_parameters(self._model, only_trainable=True)


@changes.around(ModelSummary, "_summary")
def _summary_of_full_parameters(original: Any, self: Any, trainer: Any, pl_module: Any) -> Any:
    if not is_sharded(pl_module):
        return original(self, trainer, pl_module)
    return _FullSummary(pl_module, max_depth=self._max_depth)


for _place in (lightning.fabric.strategies, theirs):
    drop_in.set(_place, "XLAFSDPStrategy", FabricStrategy)
drop_in.set(theirs, "_activation_checkpointing_auto_wrapper", wrap_recomputed)
