"""``fully_shard``: sharding a module in place, as torch's FSDP2 does."""
