"""Compiler options on a host, and compiled programs on disk."""
