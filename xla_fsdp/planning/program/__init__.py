"""Reading a compiled program."""
