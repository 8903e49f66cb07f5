"""Parse a compiled program."""
