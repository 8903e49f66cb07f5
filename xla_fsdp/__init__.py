"""Fully sharded data parallel training for PyTorch on XLA.

Names are imported when they are first used: ``xla_fsdp.launch`` must be able to set up the
runtime's environment, and ``xla_fsdp.consolidate`` runs where there is no torch_xla.
"""

from importlib import import_module as _import_module
from logging import getLogger as _getLogger
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from .batch_norm import SyncBatchNorm
    from .checkpoint.asynchronous import AsyncCheckpointer
    from .checkpoint.dcp import to_dcp
    from .checkpoint.dcp_reading import from_dcp
    from .checkpoint.full_optimizer import full_optim_state_dict, load_full_optim_state_dict
    from .checkpoint.full_state import full_state_dict, load_full_state_dict
    from .checkpoint.loading import LoadedCheckpoint, load_checkpoint
    from .checkpoint.saving import save_checkpoint
    from .checkpoint.weights import load_weights
    from .compile_cache import CompilationCounts, compilation_counts, enable_compilation_cache
    from .consolidate.format.reader import latest
    from .extras import MissingExtraError
    from .launcher import CollectiveMismatchError, RankError, RankTimeoutError, launch
    from .order import BackwardPrefetch
    from .planning.api import plan
    from .planning.compiling.compiler import CompileError
    from .planning.reporting.report import Report
    from .planning.slices.topology import UnknownTopologyError
    from .remat import checkpoint_module
    from .scan import scan_blocks
    from .wrap import (
        always_wrap_policy,
        lambda_auto_wrap_policy,
        recursive_wrap,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )
    from .wrapper import XlaFullyShardedDataParallel

__version__ = "0.1.0"

_HOMES = {
    "launch": "launcher",
    "RankError": "launcher",
    "RankTimeoutError": "launcher",
    "CollectiveMismatchError": "launcher",
    "enable_compilation_cache": "compile_cache",
    "compilation_counts": "compile_cache",
    "CompilationCounts": "compile_cache",
    "XlaFullyShardedDataParallel": "wrapper",
    "BackwardPrefetch": "order",
    "SyncBatchNorm": "batch_norm",
    "checkpoint_module": "remat",
    "scan_blocks": "scan",
    "always_wrap_policy": "wrap",
    "lambda_auto_wrap_policy": "wrap",
    "recursive_wrap": "wrap",
    "size_based_auto_wrap_policy": "wrap",
    "transformer_auto_wrap_policy": "wrap",
    "save_checkpoint": "checkpoint.saving",
    "load_checkpoint": "checkpoint.loading",
    "LoadedCheckpoint": "checkpoint.loading",
    "AsyncCheckpointer": "checkpoint.asynchronous",
    "latest": "consolidate.format.reader",
    "plan": "planning.api",
    "Report": "planning.reporting.report",
    "UnknownTopologyError": "planning.slices.topology",
    "CompileError": "planning.compiling.compiler",
    "MissingExtraError": "extras",
    "full_state_dict": "checkpoint.full_state",
    "load_full_state_dict": "checkpoint.full_state",
    "full_optim_state_dict": "checkpoint.full_optimizer",
    "load_full_optim_state_dict": "checkpoint.full_optimizer",
    "load_weights": "checkpoint.weights",
    "to_dcp": "checkpoint.dcp",
    "from_dcp": "checkpoint.dcp_reading",
    "consolidate_sharded_model_checkpoints": "consolidate",
    "consolidate_sharded_state_dicts": "consolidate",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Importing torch_xla says on every machine without an accelerator that it will use the CPU.
    root_logger = _getLogger()
    root_logger.addFilter(_is_not_about_the_cpu)
    try:
        value = getattr(_import_module(f".{home}", __name__), name)
    finally:
        root_logger.removeFilter(_is_not_about_the_cpu)
    globals()[name] = value
    return value


def _is_not_about_the_cpu(record) -> bool:
    return "Defaulting to PJRT_DEVICE=CPU" not in record.getMessage()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
