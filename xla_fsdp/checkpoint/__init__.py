"""Save and load checkpoints of a sharded model. ``xla_fsdp.consolidate.format`` defines the format.

Shared by all modules: ``inventory`` and ``optimizers`` list which elements of the unsharded model
and of its optimizer state this rank stores. ``meeting`` exchanges small values and errors between
ranks. To load, ``stored`` represents a tensor of which any range can be read, ``matching`` and
``optimizer_matching`` decide which stored tensor goes into which parameter, and ``filling`` copies
the values.

Checkpoints are saved by ``contents`` (the tensors of a rank's file), ``draft`` (an incomplete
save), ``saving`` and ``asynchronous``, and loaded by ``reading`` and ``loading``. Full state dicts:
``parts`` (gathers), ``protocol`` (torch's own state_dict, with ``unread`` tensors),
``full_state``, ``full_optimizer``, ``optimizer_names``. Weights from files: ``weights``.
Directories of torch.distributed.checkpoint: ``boxes``, ``dcp_reading``, ``dcp_writing``.
"""
