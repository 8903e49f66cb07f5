"""The errors of checkpoints, one class for each kind of problem.

Every message is one line. It begins with the file (or list entry) that is wrong, and says what was
found and what was expected.
"""


class CheckpointError(Exception):
    """Base class of all errors about the content or the path of a checkpoint."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint at the path, or no file matches the prefix and suffix."""


class UnreadableFileError(CheckpointError):
    """A file cannot be read: it is truncated, corrupt or of another format, or not permitted."""


class UnsafeFileError(CheckpointError):
    """Reading a file could run code, or access files elsewhere. Nothing in it was executed."""


class ForeignFileError(CheckpointError):
    """A file has valid content, but is not the kind of file that was expected."""


class MissingMetadataError(ForeignFileError):
    """A file has a model, but not the ``shard_metadata`` that is needed to rebuild it."""


class InvalidMetadataError(CheckpointError):
    """Metadata is incomplete, contradicts itself, or has an unknown version."""


class MetadataMismatchError(InvalidMetadataError):
    """Two ranks describe the same model differently."""


class WorldSizeError(CheckpointError):
    """Files have different world sizes, or a rank is not less than the world size."""


class MissingRankError(CheckpointError):
    """The file of at least one rank is missing."""


class DuplicateRankError(CheckpointError):
    """Two files have the same rank."""


class ShardMismatchError(CheckpointError):
    """Tensors do not match: keys are missing or unknown, or shapes or dtypes differ."""


class TiedWeightError(CheckpointError, ValueError):
    """Two names cannot be tied: the parameter does not exist, or the alias is in use."""


class OutputError(CheckpointError):
    """A file cannot be written, or the path of the result is not allowed."""


class IncompleteCheckpointError(CheckpointNotFoundError):
    """A folder has no manifest: it is not a checkpoint, or its save did not finish."""


class CorruptFileError(UnreadableFileError):
    """The bytes of a file differ from those that were saved."""


class MixedSaveError(CheckpointError):
    """A file is intact, but belongs to another save: another step, run, rank or world size."""


class CoverageError(ShardMismatchError):
    """The shards of a tensor do not cover it exactly once: a gap, an overlap, or extra elements."""


class ModelMismatchError(CheckpointError):
    """The checkpoint does not match the model or the optimizer to load it into."""


class UnsupportedValueError(CheckpointError, TypeError):
    """A value that the format cannot store, or only as code that runs when it is read."""


class OtherRankError(CheckpointError):
    """This rank had no error, but another rank failed. The message includes the other error."""


class SharedStorageError(CheckpointError):
    """A rank does not see the files of another rank: the storage is not shared."""


class UnmatchedOptimizerError(CheckpointError):
    """It is not recorded which optimizer state belongs to which parameter."""


class OptionsError(CheckpointError, ValueError):
    """Options contradict each other, or request what the checkpoint does not have."""


def first_line(error: BaseException) -> str:
    """The first line of the message of ``error``, or its type if the message is empty."""
    return str(error).partition("\n")[0] or type(error).__name__
