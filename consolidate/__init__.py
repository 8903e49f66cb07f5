"""Consolidate the sharded checkpoints of all ranks into a checkpoint of the unsharded model.

This package needs torch only, so it runs on a machine without torch_xla. It reads checkpoint
folders (``format``), and per-rank torch files of earlier versions of this package and of
torch_xla's ``XlaFullyShardedDataParallel`` (``legacy``). ``stream`` writes the result with constant
memory. Users call the command line (``__main__``), or the functions of ``stream.run``.
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
