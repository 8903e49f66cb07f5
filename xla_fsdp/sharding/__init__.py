"""What a wrapper holds: shards, and full parameters while they are used."""
