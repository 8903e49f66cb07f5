"""Everything that can be wrong with a set of rank files, one name each.

Every message is one line, begins with the file (or list entry) at fault, and says what was found
and what was expected.
"""


class CheckpointError(Exception):
    """Base of all errors raised for the content or the location of a checkpoint."""


class CheckpointNotFoundError(CheckpointError):
    """No file matches the prefix and suffix."""


class UnreadableFileError(CheckpointError):
    """A file cannot be read: truncated, corrupt, not a torch file, or no permission."""


class UnsafeFileError(CheckpointError):
    """Reading a file would need objects outside torch's safe set; nothing in it was executed."""


class ForeignFileError(CheckpointError):
    """A file matches the pattern but is not a rank file."""


class MissingMetadataError(ForeignFileError):
    """A file holds a model but not the ``shard_metadata`` needed to rebuild it."""


class InvalidMetadataError(CheckpointError):
    """``shard_metadata`` is present but incomplete, contradictory or of an unknown version."""


class MetadataMismatchError(InvalidMetadataError):
    """Two ranks describe the same model differently."""


class WorldSizeError(CheckpointError):
    """Files of different world sizes, or more ranks than the world has."""


class MissingRankError(CheckpointError):
    """At least one rank of the world has no file."""


class DuplicateRankError(CheckpointError):
    """Two files claim the same rank."""


class ShardMismatchError(CheckpointError):
    """Tensors do not fit together: missing or extra keys, or unexpected shapes or dtypes."""


class TiedWeightError(CheckpointError, ValueError):
    """A request to tie two names that the checkpoint does not allow."""


class OutputError(CheckpointError):
    """The result cannot be written where it was asked for."""


class IncompleteCheckpointError(CheckpointNotFoundError):
    """A folder has no manifest: it is no checkpoint, or one whose saving never ended."""


class CorruptFileError(UnreadableFileError):
    """The bytes of a file are not those that were saved."""


class MixedSaveError(CheckpointError):
    """A file is whole, but belongs to another save: another step, run, rank or world size."""


class CoverageError(ShardMismatchError):
    """The shards of a tensor leave a gap, overlap, or reach beyond its end."""


class ModelMismatchError(CheckpointError):
    """The checkpoint and the model or optimizer to load it into do not fit together."""


class UnsupportedValueError(CheckpointError, TypeError):
    """Something that this format cannot store without executing code when it is read."""


class OtherRankError(CheckpointError):
    """This rank did its part, but another one failed; the message has that one's error."""


class SharedStorageError(CheckpointError):
    """Ranks do not see each other's files."""


class UnmatchedOptimizerError(CheckpointError):
    """Which optimizer state belongs to which parameter is not recorded and cannot be derived."""


class OptionsError(CheckpointError, ValueError):
    """Options that do not go together, or ask for what the checkpoint does not have."""


def first_line(error: BaseException) -> str:
    """What ``error`` says before it goes on (a stack in C++, advice), or else its type."""
    return str(error).partition("\n")[0] or type(error).__name__
