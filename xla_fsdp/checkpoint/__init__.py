"""Checkpoints from and into a sharded model. The format itself is ``xla_fsdp.consolidate.format``.

What all ways share: ``inventory`` and ``optimizers`` (what this rank holds of the unsharded model),
``meeting`` (how ranks agree), and to load: ``stored`` (a tensor that lies somewhere, read in part),
``matching`` and ``optimizer_matching`` (which of them fills what: all the rules), ``filling``.

Checkpoints: ``contents`` (as tensors of a file), ``draft``, ``saving``, ``asynchronous``;
``reading``, ``loading``. Full state: ``parts`` (gathers), ``protocol``
(torch's own state_dict, on ``unread`` tensors), ``full_state``, ``full_optimizer``,
``optimizer_names``. Weights from files: ``weights``. Directories of
torch.distributed.checkpoint: ``boxes``, ``dcp*``.
"""
