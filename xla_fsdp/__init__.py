"""Fully sharded data parallel training for PyTorch on XLA.

Names are imported at their first use: ``xla_fsdp.launch`` sets environment variables before
torch_xla is imported, and ``xla_fsdp.consolidate`` works without torch_xla.
"""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from .checkpoint.dcp_reading import from_dcp
    from .checkpoint.dcp_writing import to_dcp
    from .checkpoint.full_state import (
        full_optim_state_dict,
        full_state_dict,
        load_full_optim_state_dict,
        load_full_state_dict,
    )
    from .checkpoint.loading import LoadedCheckpoint, load_checkpoint
    from .checkpoint.saving import AsyncCheckpointer, save_checkpoint
    from .checkpoint.tiers.checkpointer import TieredCheckpointer
    from .checkpoint.weights import load_weights
    from .collectives.order import BackwardPrefetch
    from .compiled.cache import CompilationCounts, compilation_counts, enable_compilation_cache
    from .consolidate import (
        consolidate_sharded_model_checkpoints,
        consolidate_sharded_state_dicts,
    )
    from .consolidate.format.reader import latest_checkpoint
    from .extras import MissingExtraError
    from .grad_scaler import ShardedGradScaler
    from .inplace import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        UnshardHandle,
        fully_shard,
    )
    from .layers.batch_norm import SyncBatchNorm
    from .plan_compiler import UnusableCompilerError
    from .planning.api import plan
    from .planning.compiling.compiler import CompileError
    from .planning.reporting.report import Report
    from .planning.tuning.api import training_step, tune
    from .planning.tuning.settings import ShardingSettings
    from .planning.tuning.tuning import Tuning
    from .pods.divergence import DivergenceError, detect_divergence
    from .pods.preemption import Preempted, Preemption
    from .pods.profiling import profile
    from .pods.verification_report import Verification
    from .pods.verify import verify
    from .ranks.launch import CollectiveMismatchError, RankError, RankTimeoutError, launch
    from .remat import checkpoint_module
    from .scan.blocks import scan_blocks
    from .sharding.cpu_offload import CPUOffload
    from .sharding.deferred_values import defer_init
    from .sharding.layout import ShardedParameterError
    from .sharding.mixed_precision import MixedPrecision
    from .sharding.options import FSDPOptions, ShardingStrategy
    from .tpu.calibration import Calibration, CalibrationError
    from .tpu.topology import UnknownTopologyError
    from .wrap import (
        always_wrap_policy,
        lambda_auto_wrap_policy,
        recursive_wrap,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )
    from .wrapper import XlaFullyShardedDataParallel, register_fsdp_forward_method

__version__ = "0.1.0"

_PUBLIC = {
    "ranks.launch": "launch RankError RankTimeoutError CollectiveMismatchError",
    "pods.divergence": "detect_divergence DivergenceError",
    "pods.profiling": "profile",
    "pods.preemption": "Preemption Preempted",
    "compiled.cache": "enable_compilation_cache compilation_counts CompilationCounts",
    "wrapper": "XlaFullyShardedDataParallel register_fsdp_forward_method",
    "inplace": (
        "fully_shard FSDPModule UnshardHandle MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy"
    ),
    "grad_scaler": "ShardedGradScaler",
    "collectives.order": "BackwardPrefetch",
    "sharding.mixed_precision": "MixedPrecision",
    "sharding.cpu_offload": "CPUOffload",
    "sharding.options": "FSDPOptions ShardingStrategy",
    "sharding.deferred_values": "defer_init",
    "sharding.layout": "ShardedParameterError",
    "layers.batch_norm": "SyncBatchNorm",
    "remat": "checkpoint_module",
    "scan.blocks": "scan_blocks",
    "wrap": (
        "always_wrap_policy lambda_auto_wrap_policy recursive_wrap size_based_auto_wrap_policy "
        "transformer_auto_wrap_policy"
    ),
    "checkpoint.saving": "save_checkpoint AsyncCheckpointer",
    "checkpoint.loading": "load_checkpoint LoadedCheckpoint",
    "checkpoint.tiers.checkpointer": "TieredCheckpointer",
    "consolidate.format.reader": "latest_checkpoint",
    "planning.api": "plan",
    "planning.reporting.report": "Report",
    "planning.tuning.api": "tune training_step",
    "planning.tuning.settings": "ShardingSettings",
    "planning.tuning.tuning": "Tuning",
    "tpu.topology": "UnknownTopologyError",
    "tpu.calibration": "Calibration CalibrationError",
    "pods.verify": "verify",
    "pods.verification_report": "Verification",
    "planning.compiling.compiler": "CompileError",
    "plan_compiler": "UnusableCompilerError",
    "extras": "MissingExtraError",
    "checkpoint.full_state": (
        "full_state_dict load_full_state_dict full_optim_state_dict load_full_optim_state_dict"
    ),
    "checkpoint.weights": "load_weights",
    "checkpoint.dcp_writing": "to_dcp",
    "checkpoint.dcp_reading": "from_dcp",
    "consolidate": "consolidate_sharded_model_checkpoints consolidate_sharded_state_dicts",
}
_MODULE_OF_NAME = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> object:
    source = _MODULE_OF_NAME.get(name)
    if source is None:
        new = _import_module(".deprecated", __name__).new_name(__name__, name)
        if new is not None:
            return getattr(_sys.modules[__name__], new)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    needs_torch_xla = source.partition(".")[0] not in (
        "consolidate",
        "extras",
        "plan_compiler",
        "tpu",
    )
    if needs_torch_xla and "torch_xla" not in _sys.modules:
        _import_module(".extras", __name__).require_torch_xla()
        _choose_device()
    if needs_torch_xla:
        _import_module(".moves", __name__).watch_moves()
    value = getattr(_import_module(f".{source}", __name__), name)
    globals()[name] = value
    return value


def _choose_device() -> None:
    """Chooses the CPU without an accelerator, as torch_xla does with a warning."""
    may_have_chips = _import_module(".compiler_options", __name__).may_have_chips
    if not may_have_chips() and _find_spec("libneuronxla") is None:
        _os.environ.setdefault("PJRT_DEVICE", "CPU")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A script may move a model before it uses a name of this package.
if "torch_xla" in _sys.modules:
    _import_module(".moves", __name__).watch_moves()

# "1", or names of libraries separated by commas: integrations for an unchanged script.
_asked = _os.environ.get("XLA_FSDP_DROP_IN", "").split(",")
for _library in ("transformers", "lightning"):
    if _library in _asked or (_asked == ["1"] and _find_spec(_library) is not None):
        _integration = _import_module(f".integrations.{_library}", __name__)
        getattr(_integration, "install_drop_in", _integration.install)()
