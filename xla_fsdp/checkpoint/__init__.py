"""Save and load checkpoints of a sharded model. ``xla_fsdp.consolidate.format`` defines the format."""
