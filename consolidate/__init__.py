"""Consolidate, reshard and verify checkpoints of sharded models. Needs torch, not torch_xla.

``format`` is the checkpoint format; ``legacy`` reads per-rank torch files of version 1 and of
torch_xla's ``XlaFullyShardedDataParallel``; ``stream`` writes results with constant memory.
"""

from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptFileError,
    CoverageError,
    DuplicateRankError,
    ForeignFileError,
    IncompleteCheckpointError,
    InvalidMetadataError,
    MetadataMismatchError,
    MissingMetadataError,
    MissingRankError,
    MixedSaveError,
    OptionsError,
    OutputError,
    ShardMismatchError,
    TiedWeightError,
    UnmatchedOptimizerError,
    UnreadableFileError,
    UnsafeFileError,
    UnsupportedValueError,
    WorldSizeError,
)
from .stream.run import (
    Result,
    consolidate_checkpoint,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    reshard_checkpoint,
    verify_checkpoint,
)

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CorruptFileError",
    "CoverageError",
    "DuplicateRankError",
    "ForeignFileError",
    "IncompleteCheckpointError",
    "InvalidMetadataError",
    "MetadataMismatchError",
    "MissingMetadataError",
    "MissingRankError",
    "MixedSaveError",
    "OptionsError",
    "OutputError",
    "Result",
    "ShardMismatchError",
    "TiedWeightError",
    "UnmatchedOptimizerError",
    "UnreadableFileError",
    "UnsafeFileError",
    "UnsupportedValueError",
    "WorldSizeError",
    "consolidate_checkpoint",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
    "reshard_checkpoint",
    "verify_checkpoint",
]
