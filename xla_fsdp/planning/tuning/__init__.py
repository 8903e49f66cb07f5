"""The fastest settings for a training step on a TPU slice, without a TPU.

The data pass through ``settings``, ``facts`` (of a traced step), ``estimate``, ``space`` (the
candidates), ``search`` (which to compile), and ``tuning`` (the result).
"""
