"""Writes files of the unsharded model from a sharded checkpoint, a few MiB at a time. Torch only.

The data passes through these modules, in this order: ``sources`` (reads ranges of tensors),
``plan`` (assigns tensors to files), ``tensors`` (reads ahead), ``result_file`` (writes one file),
``stage`` (a temporary folder that replaces the target). ``run`` calls them.
"""
