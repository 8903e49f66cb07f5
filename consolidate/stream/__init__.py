"""From a sharded checkpoint to files of the unsharded model, a few MiB at a time. Torch only.

The data passes through, in this order: ``sharded`` or ``legacy.source`` (a ``Source``: any elements
of any tensor), ``plan`` (which tensors into which files), ``pump`` (reads ahead),
``result_file`` (writes one file), ``stage`` (beside the target, then in its place).
``run`` ties them together; ``reshard`` is another thing that can be done with a source.
"""
