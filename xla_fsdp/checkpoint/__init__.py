"""Checkpoints from and into a sharded model. The format itself is ``xla_fsdp.consolidate.format``.

The data passes through, when saving: ``inventory`` and ``optimizers`` (what this rank holds of the
unsharded model), ``contents`` (as tensors of a file), ``saving``; when loading: ``matching`` (what
of the checkpoint this rank needs), ``reading``, ``loading``. ``meeting`` is how ranks agree.

Full state: ``parts`` (gathers), ``stored`` (what can be read in part), ``filling``, ``full_state``,
``full_optimizer``; weights from files: ``weight_files``, ``weights``; torch.distributed.checkpoint:
``boxes``, ``dcp*``.
"""
