"""The state of a wrapper: shards, and full parameters while they are in use."""
