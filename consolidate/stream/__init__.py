"""Writes files of the unsharded model from a sharded checkpoint, a few MiB at a time. Torch only.

The data passes through these modules, in this order: ``sharded`` or ``legacy.source`` (a
``Source``, which reads ranges of tensors), ``plan`` (assigns tensors to files), ``pump`` (reads
ahead), ``result_file`` (writes one file), ``stage`` (a temporary folder that replaces the target).
``run`` calls them. ``reshard`` writes a checkpoint with another number of ranks instead.
"""
