"""Join the sharded checkpoints of all ranks into one of the unsharded model.

Needs torch only: runs on a machine without torch_xla. Reads what this package writes and what
torch_xla's own ``XlaFullyShardedDataParallel`` writes. The data passes through, in this order:
``storage`` (files), ``native`` or ``intree`` (metadata to ``layout``), ``ranks`` (checks),
``assemble`` (tensors), ``storage`` again.
"""

from .checkpoints import consolidate_sharded_model_checkpoints, consolidate_sharded_state_dicts
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DuplicateRankError,
    ForeignFileError,
    InvalidMetadataError,
    MetadataMismatchError,
    MissingMetadataError,
    MissingRankError,
    OutputError,
    ShardMismatchError,
    TiedWeightError,
    UnreadableFileError,
    UnsafeFileError,
    WorldSizeError,
)

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "DuplicateRankError",
    "ForeignFileError",
    "InvalidMetadataError",
    "MetadataMismatchError",
    "MissingMetadataError",
    "MissingRankError",
    "OutputError",
    "ShardMismatchError",
    "TiedWeightError",
    "UnreadableFileError",
    "UnsafeFileError",
    "WorldSizeError",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
]
