"""From a sharded checkpoint to files of the unsharded model, a few MiB at a time. Torch only.

The data passes through, in this order: ``sharded`` or ``legacy`` (a ``source``: any elements of any
tensor), ``plan`` (which tensors into which files), ``pump`` (reads ahead), ``safetensors_file`` or
``torch_file`` (one file), ``stage`` (beside the target, then in its place). ``run`` ties them
together; ``reshard`` and ``verify`` are the other two things that can be done with a source.
"""
