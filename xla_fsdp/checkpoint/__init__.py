"""Save and load checkpoints of a sharded model. ``xla_fsdp.consolidate.format`` defines the format.

``inventory`` and ``optimizers`` list what this rank stores. ``matching`` decides which stored
tensor goes into which parameter; ``value_loading`` copies the values. ``protocol`` uses torch's own
``state_dict()`` methods for full state dicts.
"""
