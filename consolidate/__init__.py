"""Join the sharded checkpoints of all ranks into one of the unsharded model.

Needs torch only: runs on a machine without torch_xla. Reads checkpoint folders (``format``), the
per-rank torch files that this package wrote before, and those of torch_xla's own
``XlaFullyShardedDataParallel``. Two ways through:

- ``stream``: from any of them to files, in constant memory. The command line is this.
- ``checkpoints``: from per-rank torch files to a state_dict in memory: ``storage`` (files),
  ``native`` or ``intree`` (metadata to ``layout``), ``ranks`` (checks), ``assemble`` (tensors).
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
from .stream.run import Result, consolidate_checkpoint
from .stream.verify import verify_checkpoint

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
