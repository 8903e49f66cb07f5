"""Save and load checkpoints of a sharded model, in the format of ``xla_fsdp.consolidate``."""
