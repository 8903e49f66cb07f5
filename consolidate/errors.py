"""The errors of checkpoints. A message is one line, which begins with the file that is wrong."""


class CheckpointError(Exception):
    """Base class of all errors of checkpoints."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint at the path, or no file matches."""


class UnreadableFileError(CheckpointError):
    """A file is truncated, corrupt, of another format, or not permitted to be read."""


class NotAFolderError(UnreadableFileError):
    """A file is where a folder is expected."""


class UnsafeFileError(CheckpointError):
    """Reading a file could run code, or access other files. Nothing in it was executed."""


class ForeignFileError(CheckpointError):
    """A file is valid, but not of the expected kind."""


class MissingMetadataError(ForeignFileError):
    """A file has a model, but no ``shard_metadata``."""


class InvalidMetadataError(CheckpointError):
    """Metadata is incomplete, contradicts itself, or has an unknown version."""


class MetadataMismatchError(InvalidMetadataError):
    """Two ranks describe the same model differently."""


class WorldSizeError(CheckpointError):
    """Files have different world sizes, or a rank is not less than the world size."""


class MissingRankError(CheckpointError):
    """The file of a rank is missing."""


class DuplicateRankError(CheckpointError):
    """Two files have the same rank."""


class ShardMismatchError(CheckpointError):
    """Tensors are missing or unknown, or have another shape or dtype."""


class TiedWeightError(CheckpointError, ValueError):
    """The parameter to tie does not exist, or the alias is in use."""


class OutputError(CheckpointError):
    """A file cannot be written, or the path of the result is not allowed."""


class IncompleteCheckpointError(CheckpointNotFoundError):
    """A folder has no manifest: it is not a checkpoint, or its save did not finish."""


class CorruptFileError(UnreadableFileError):
    """The bytes of a file differ from those that were saved."""


class MixedSaveError(CheckpointError):
    """A file is intact, but of another step, run, rank or world size."""


class CoverageError(ShardMismatchError):
    """The shards of a tensor do not cover it exactly once."""


class ModelMismatchError(CheckpointError):
    """The checkpoint does not match the model or optimizer to load it into."""


class UnsupportedValueError(CheckpointError, TypeError):
    """The format cannot store a value, or only as code that runs when it is read."""


class OtherRankError(CheckpointError):
    """Another rank failed. The message includes its error."""


class SharedStorageError(CheckpointError):
    """A rank cannot see the files of another rank."""


class UnmatchedOptimizerError(CheckpointError):
    """It is not recorded which optimizer state belongs to which parameter."""


class OptionsError(CheckpointError, ValueError):
    """Options contradict each other, or request what the checkpoint does not have."""


def first_line(error: BaseException) -> str:
    """The first line of the message of ``error``, or its type if there is no message."""
    return str(error).partition("\n")[0] or type(error).__name__
