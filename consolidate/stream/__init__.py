"""Writes files of the unsharded model from a sharded checkpoint, a few MiB at a time."""
