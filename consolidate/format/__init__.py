"""Reads and writes the checkpoint format, defined in ``consolidate/README.md``."""
