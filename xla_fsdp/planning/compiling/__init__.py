"""Runs the TPU compiler on a traced program."""
