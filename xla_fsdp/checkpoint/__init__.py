"""Save and load checkpoints of a sharded model. ``xla_fsdp.consolidate.format`` defines the format.

Shared by all modules: ``inventory`` and ``optimizers`` list which elements of the unsharded model
and of its optimizer state this rank stores. ``rank_exchange`` exchanges small values and errors
between ranks. To load, ``readable_tensor`` represents a tensor of which any range can be read,
``matching`` decides which stored tensor goes into which parameter, and ``value_loading`` copies the
values.

Checkpoints are saved by ``contents`` (the tensors of a rank's file) and ``saving``, and loaded by
``loading``. Full state dicts: ``protocol`` (torch's own state_dict) and ``full_state``. Weights
from files: ``weights``. Directories of torch.distributed.checkpoint: ``dcp_reading``,
``dcp_writing``.
"""
