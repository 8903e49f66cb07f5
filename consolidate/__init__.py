"""Join the sharded checkpoints of all ranks into one of the unsharded model.

Needs torch only: runs on a machine without torch_xla. Reads checkpoint folders (``format``), the
per-rank torch files that this package wrote before, and those of torch_xla's own
``XlaFullyShardedDataParallel`` (``legacy``): each is a ``source``. ``stream`` brings it to files in
constant memory; the command line (``__main__``) and the functions that also return a state_dict
(``checkpoints``) are its fronts.
"""

from .checkpoints import consolidate_sharded_model_checkpoints, consolidate_sharded_state_dicts
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
from .stream.reshard import reshard_checkpoint
from .stream.run import Result, consolidate_checkpoint, verify_checkpoint

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
